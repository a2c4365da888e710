// Architecture names as compilers spell them ("sm_90a", "compute_80", "gfx942"): which instruction family an architecture has, and
// whether code compiled for some runs on another. Plain host code, needs no device.
#pragma once

#include <string_view>

namespace int4_emu::gpu {

// Without what a driver or a build may append: "gfx942:sramecc+:xnack-" is gfx942.
inline std::string_view base_architecture(std::string_view name) { return name.substr(0, name.find(':')); }

inline bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

// "sm_103f" is version 103 with suffix 'f'; version 0 for anything else than `prefix` and a number.
struct ComputeCapability {
  int version = 0;  // ten times the major number plus the minor one
  char suffix = 0;  // 'a': this very chip, 'f': its family
};
inline ComputeCapability compute_capability(std::string_view name, std::string_view prefix) {
  ComputeCapability out;
  if (!starts_with(name, prefix)) return out;
  for (const char c : name.substr(prefix.size())) {
    if (out.suffix != 0) return {};
    if (c >= '0' && c <= '9') {
      if (out.version > 9999) return {};
      out.version = out.version * 10 + (c - '0');
    } else {
      out.suffix = c;
    }
  }
  return out;
}

// Machine code runs on its own major version from its own minor one upwards, PTX on everything newer, AMD code on its own chip.
inline bool entry_serves(std::string_view compiled, std::string_view device) {
  const ComputeCapability chip = compute_capability(device, "sm_");
  if (chip.version == 0) return base_architecture(compiled) == base_architecture(device);
  const ComputeCapability code = compute_capability(compiled, "sm_"), ptx = compute_capability(compiled, "compute_");
  const ComputeCapability& entry = code.version ? code : ptx;
  if (entry.version == 0 || entry.version > chip.version) return false;
  if (entry.suffix == 'a') return entry.version == chip.version;
  return entry.version / 10 == chip.version / 10 || (ptx.version != 0 && entry.suffix == 0);
}

// `compiled` lists names between commas, semicolons or blanks; "unknown", of a build that did not say, serves all.
inline bool arch_is_served(std::string_view compiled, std::string_view device) {
  if (compiled == "unknown") return true;
  while (!compiled.empty()) {
    const size_t end = compiled.find_first_of(",; ");
    const std::string_view entry = compiled.substr(0, end);
    if (!entry.empty() && entry_serves(entry, device)) return true;
    compiled = end == std::string_view::npos ? std::string_view() : compiled.substr(end + 1);
  }
  return false;
}

// The family of atoms.txt, better than fma, that an architecture has the instructions for; null where there is none.
inline const char* family_for(std::string_view device) {
  const std::string_view arch = base_architecture(device);
  if (compute_capability(arch, "sm_").version >= 80) return "mma_sm80";
  if (arch == "gfx90a" || arch == "gfx942" || arch == "gfx950") return "mfma_gfx9";
  if (starts_with(arch, "gfx11")) return "wmma_gfx11";
  if (starts_with(arch, "gfx120")) return "wmma_gfx12";
  return nullptr;
}

}  // namespace int4_emu::gpu
