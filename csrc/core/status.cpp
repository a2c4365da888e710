#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace int4_emu {

Status make_error(Code code, const char* format, ...) {
  Status status;
  status.code = code;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message, sizeof(status.message), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace int4_emu
