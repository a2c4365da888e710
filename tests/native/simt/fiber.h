// Switching between stacks. Assembly where it is known: swapcontext enters the kernel each time, and a barrier of 1024 threads is 1024
// switches.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)

extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

namespace simt {

class Context {
 public:
  // The next switch to this context calls `entry`, which must not return, on the stack [base, base + size).
  void prepare(char* base, size_t size, void (*entry)()) {
    void** top = reinterpret_cast<void**>(base + size);
    *--top = nullptr;  // where entry would return to; keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    pointer_ = top;
  }
  void switch_to(Context& other) { simt_switch(&pointer_, other.pointer_); }

 private:
  void* pointer_ = nullptr;
};

}  // namespace simt

#else
#include <ucontext.h>

namespace simt {

class Context {
 public:
  void prepare(char* base, size_t size, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = base;
    context_.uc_stack.ss_size = size;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};

}  // namespace simt
#endif
