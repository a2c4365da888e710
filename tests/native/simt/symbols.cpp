// Names of functions, from this program's own symbol table: kernels have internal linkage, which dladdr does not see.
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>
#include <elf.h>
#include <fstream>
#include <iterator>
#include <link.h>
#include <map>

#include "program.h"

namespace simt {
namespace {

std::map<uintptr_t, std::string> read_symbols() {
  std::map<uintptr_t, std::string> found;
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::vector<char> data{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (data.size() < sizeof(ElfW(Ehdr))) return found;
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(data.data());
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(data.data() + header->e_shoff);
  uintptr_t base = 0;  // where the program was loaded
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void* out) { return *static_cast<uintptr_t*>(out) = info->dlpi_addr, 1; }, &base);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(data.data() + sections[i].sh_offset);
    const char* names = data.data() + sections[sections[i].sh_link].sh_offset;
    for (size_t s = 0; s < sections[i].sh_size / sizeof(ElfW(Sym)); ++s) {
      if ((symbols[s].st_info & 0xf) == STT_FUNC && symbols[s].st_value) found[base + symbols[s].st_value] = names + symbols[s].st_name;
    }
  }
  return found;
}

}  // namespace

std::string symbol_at(const void* address) {
  static const std::map<uintptr_t, std::string> symbols = read_symbols();
  const auto at = symbols.find(reinterpret_cast<uintptr_t>(address));
  if (at == symbols.end()) return "unknown function";
  int status = 0;
  char* text = abi::__cxa_demangle(at->second.c_str(), nullptr, nullptr, &status);
  const std::string name = status == 0 ? text : at->second;
  std::free(text);
  return name;
}

}  // namespace simt
