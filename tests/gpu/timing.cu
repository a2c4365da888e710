// The table of times: dequantise against a device copy, whole layers as graph replays beside their floor.
#include <algorithm>

#include "../../csrc/core/layout.h"
#include "harness.h"

namespace selfcheck {
namespace {

using Event = INT4_EMU_RUNTIME(Event_t);

__global__ void fill_kernel(uint32_t* out, int64_t n, uint32_t mask, uint32_t base, uint32_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    uint32_t v = static_cast<uint32_t>(i) * 2654435761u + seed;
    v ^= v >> 15;
    v *= 2246822519u;
    v ^= v >> 13;
    out[i] = (v & mask) | base;
  }
}

// Device memory of random bits; `small` makes pairs of bf16 numbers of either sign near 1e-2.
struct Random16 {
  explicit Random16(int64_t bytes, bool small) {
    must(INT4_EMU_RUNTIME(Malloc)(&data, bytes + 64), "allocate");
    must(gpu::launch("fill", fill_kernel, 1024, 256, 0, nullptr, static_cast<uint32_t*>(data), bytes / 4 + 1, small ? 0x807f807fu : 0xffffffffu,
                     small ? 0x3c003c00u : 0u, 5u),
         "fill");
  }
  ~Random16() { INT4_EMU_RUNTIME(Free)(data); }
  Random16(const Random16&) = delete;
  Random16& operator=(const Random16&) = delete;
  void* data = nullptr;
};

// Microseconds of body(), the median of several.
template <class Body>
double time_us(gpu::Stream stream, int repeats, const Body& body) {
  Event begin, end;
  must(INT4_EMU_RUNTIME(EventCreate)(&begin), "event");
  must(INT4_EMU_RUNTIME(EventCreate)(&end), "event");
  std::vector<double> times;
  for (int i = 0; i < repeats + 2; ++i) {
    must(INT4_EMU_RUNTIME(EventRecord)(begin, stream), "record");
    body();
    must(INT4_EMU_RUNTIME(EventRecord)(end, stream), "record");
    must(INT4_EMU_RUNTIME(EventSynchronize)(end), "wait");
    float ms = 0;
    must(INT4_EMU_RUNTIME(EventElapsedTime)(&ms, begin, end), "elapsed");
    if (i >= 2) times.push_back(ms * 1e3);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double copy_bytes_per_us(gpu::Stream stream) {
  const int64_t bytes = int64_t{1} << 30;
  const Random16 from(bytes, false), to(bytes, false);
  const double us = time_us(stream, 10, [&] {
    must(INT4_EMU_RUNTIME(MemcpyAsync)(to.data, from.data, bytes, INT4_EMU_RUNTIME(MemcpyDeviceToDevice), stream), "copy");
  });
  return 2. * bytes / us;
}

void time_dequantize(gpu::Stream stream, double copy) {
  const int64_t batch = 8, o = 14336, k = 4096, group = 128;
  for (Format format : {Format::canonical, Format::gptq_v1, Format::awq}) {
    const Random16 codes(batch * o * k / 2, false), scales(batch * o * k / group * 2, true), zeros(batch * o * k / group, false),
        out(batch * o * k * 2, false);
    PackedMatrix m;
    m.format = format, m.batch = batch, m.out_features = o, m.in_features = k, m.groups = k / group, m.group_size = group;
    m.qweight = codes.data, m.scales = scales.data, m.scale_dtype = DType::bf16, m.qzeros = zeros.data;
    const double us = time_us(stream, 10, [&] { must(gpu::dequantize(m, DType::bf16, out.data, stream), "dequantize"); });
    const double bytes = 2.5 * batch * o * k + 2.5 * batch * o * (k / group);
    std::printf("dequantize %-10s [%lld, %lld, %lld] g128 to bf16: %.0f us, %.0f GB/s, %.0f %% of copy\n", format_name(format),
                (long long)batch, (long long)o, (long long)k, us, bytes / us / 1e3, 100 * bytes / us / copy);
  }
}

struct Shape {
  const char* name;
  int64_t hidden, intermediate, experts, topk, group;
};

Weight random_weight(const Shape& s, int64_t n, int64_t k, bool packed, const Random16& data, const Random16& scales) {
  Weight w;
  w.experts = s.experts, w.n = n, w.k = k, w.data = data.data, w.packed = packed, w.dtype = DType::bf16;
  w.n_stride = packed ? k / 2 : k, w.expert_stride = n * w.n_stride;
  w.scales = scales.data, w.scale_dtype = DType::bf16, w.group_size = s.group, w.groups = k / s.group;
  return w;
}

// Layers whose ids differ from one to the next, so that little is left in cache, in one graph.
void time_layer(gpu::Stream stream, const Shape& s, bool packed, double copy) {
  constexpr int kLayers = 8;
  const int64_t up = s.experts * 2 * s.intermediate * s.hidden, down = s.experts * s.hidden * s.intermediate;
  const Random16 w13(packed ? up / 2 : up * 2, !packed), w2(packed ? down / 2 : down * 2, !packed);
  const Random16 s13(up / s.group * 2, true), s2(down / s.group * 2, true);
  for (int64_t tokens : {1, 4, 16, 64, 256, 1024, 4096}) {
    Random random(static_cast<unsigned>(tokens));
    const int64_t slots = tokens * s.topk;
    std::vector<int32_t> ids(slots * kLayers);
    double touched = 0;
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<bool> hit(s.experts);
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<int32_t> all(s.experts);
        for (int64_t e = 0; e < s.experts; ++e) all[e] = static_cast<int32_t>(e);
        for (int64_t j = 0; j < s.topk; ++j) {
          std::swap(all[j], all[j + random() % (s.experts - j)]);
          ids[layer * slots + t * s.topk + j] = all[j];
          hit[all[j]] = true;
        }
      }
      touched += static_cast<double>(std::count(hit.begin(), hit.end(), true)) / kLayers;
    }
    const Buffer<int32_t> device_ids(ids);
    const Buffer<float> weights(std::vector<float>(slots, 1.f / s.topk));
    const Random16 x(tokens * s.hidden * 2, true);
    Random16 out(tokens * s.hidden * 2, true);
    MoeProblem p;
    p.tokens = tokens, p.hidden = s.hidden, p.intermediate = s.intermediate, p.topk = s.topk, p.x = x.data, p.x_stride = s.hidden,
    p.dtype = DType::bf16;
    p.w13 = random_weight(s, 2 * s.intermediate, s.hidden, packed, w13, s13),
    p.w2 = random_weight(s, s.hidden, s.intermediate, packed, w2, s2);
    p.topk_weights = weights.get(), p.global_experts = s.experts, p.out = out.data;
    Buffer<uint8_t> workspace(gpu::moe_workspace_bytes(p));
    INT4_EMU_RUNTIME(Graph_t) graph;
    INT4_EMU_RUNTIME(GraphExec_t) instance;
    must(INT4_EMU_RUNTIME(StreamBeginCapture)(stream, INT4_EMU_RUNTIME(StreamCaptureModeGlobal)), "capture");
    for (int layer = 0; layer < kLayers; ++layer) {
      p.topk_ids = device_ids.get() + layer * slots;
      must(gpu::fused_moe(p, workspace.get(), workspace.bytes(), stream), "fused_moe");
    }
    must(INT4_EMU_RUNTIME(StreamEndCapture)(stream, &graph), "end of capture");
    must(INT4_EMU_RUNTIME(GraphInstantiate)(&instance, graph, nullptr, nullptr, 0), "instantiate");
    const double us = time_us(stream, 9, [&] { must(INT4_EMU_RUNTIME(GraphLaunch)(instance, stream), "replay"); }) / kLayers;
    must(INT4_EMU_RUNTIME(GraphExecDestroy)(instance), "destroy");
    must(INT4_EMU_RUNTIME(GraphDestroy)(graph), "destroy");
    const double elements = touched * 3. * s.hidden * s.intermediate;
    const double bytes = elements * (packed ? 0.5 + 2. / s.group : 2.), operations = 6. * slots * s.hidden * s.intermediate;
    const double floor = std::max(bytes / copy, operations / 730e6);
    std::printf("%-8s %-6s M=%-5lld %9.1f us  floor %8.1f  %3.0f %%\n", s.name, packed ? "int4" : "bf16", (long long)tokens, us, floor,
                100 * floor / us);
  }
}

}  // namespace

void time_everything() {
  gpu::Stream stream;
  must(INT4_EMU_RUNTIME(StreamCreate)(&stream), "stream");
  const double copy = copy_bytes_per_us(stream);
  std::printf("device copy, read and write: %.2f TB/s\n", copy / 1e6);
  time_dequantize(stream, copy);
  const Shape shapes[] = {{"mixtral", 4096, 14336, 8, 2, 128}, {"qwen3", 2048, 768, 128, 8, 32}, {"dsv3-32", 7168, 2048, 32, 8, 32}};
  for (const Shape& s : shapes) {
    for (bool packed : {true, false}) time_layer(stream, s, packed, copy);
  }
  must(INT4_EMU_RUNTIME(StreamDestroy)(stream), "destroy");
}

}  // namespace selfcheck
