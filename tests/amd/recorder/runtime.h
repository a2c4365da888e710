// A stand-in for libamdhip64 that runs nothing and hands every launch to whoever asked for it.
#pragma once

#include <cstddef>
#include <cstdint>

struct RecordedLaunch {
  const char* kernel;  // mangled
  unsigned grid[3], block[3];
  size_t shared;  // dynamic, bytes
  void* stream;
  void** arguments;  // valid during the call alone
};

extern "C" {
// Every launch and every copy on a stream goes there. Device n is the n-th name given to recorder_add_device.
void recorder_on_launch(void (*callback)(const RecordedLaunch&));
void recorder_on_copy(void (*callback)(void* to, const void* from, size_t bytes, void* stream));
int recorder_add_device(const char* architecture, int wave);
// The next launch fails with this error (a hipError_t), once.
void recorder_fail_next(int error);
}
