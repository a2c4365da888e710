#include "layout.h"

namespace int4_emu {
namespace {

using Zeros = FormatTraits::Zeros;

struct Row {
  const char* name;
  FormatTraits traits;  // transposed, packed_along_out, interleaved, is_signed, plain_int8, scales_are_1d, zeros
};

// Indexed by the enum's number.
constexpr Row kRows[kFormatCount] = {
    {"canonical", {false, false, false, false, false, false, Zeros::as_is}},
    {"compressed_tensors", {false, false, false, false, false, false, Zeros::as_is}},
    {"gptq_v1", {true, false, false, false, false, false, Zeros::word_minus_one}},
    {"gptq_v2", {true, false, false, false, false, false, Zeros::as_is}},
    {"awq", {true, true, true, false, false, false, Zeros::as_is}},
    {"quark_int_order", {true, true, false, true, true, false, Zeros::as_is}},
    {"quark_int_reorder", {true, true, true, true, true, false, Zeros::as_is}},
    {"quark_uint_order", {true, true, false, false, true, false, Zeros::as_is}},
    {"quark_uint_reorder", {true, true, true, false, true, false, Zeros::as_is}},
    {"quark_int_channel_order", {false, false, false, true, true, true, Zeros::as_is}},
    {"quark_int_channel_reorder", {false, false, true, true, true, true, Zeros::as_is}},
    {"quark_uint_channel_order", {false, false, false, false, true, true, Zeros::as_is}},
    {"quark_uint_channel_reorder", {false, false, true, false, true, true, Zeros::as_is}},
    {"gptq_v1_nibble", {true, false, false, false, false, false, Zeros::code_minus_one}},
};

}  // namespace

FormatTraits format_traits(Format format) { return kRows[static_cast<int32_t>(format)].traits; }

const char* format_name(Format format) {
  const int32_t i = static_cast<int32_t>(format);
  return i >= 0 && i < kFormatCount ? kRows[i].name : "unknown";
}

}  // namespace int4_emu
