// What a torch-free entry point returns: the binding turns it into an exception.
#pragma once

namespace int4_emu {

enum class Code : int { ok = 0, invalid_value = 1, unsupported = 2, internal = 3 };

struct Status {
  Code code = Code::ok;
  char message[240] = {0};  // a whole sentence with the numbers; empty when ok
  explicit operator bool() const { return code == Code::ok; }
};

// printf-style; truncates at the size of `message`.
Status make_error(Code code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace int4_emu
