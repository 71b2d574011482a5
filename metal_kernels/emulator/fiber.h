// Threads as fibers: a stack each, switched by hand.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include "tally.h"

namespace {
constexpr size_t kStack = 128 * 1024;
enum State { kReady, kSimd, kBarrier, kDone };

struct Ids {
  uint32_t pos_grid[3], pos_tg[3], tg_pos[3], tg_size[3], tg_size_full[3], grid[3], tg_count[3];
  uint32_t lane, simd, index, simds, simds_full;
};
struct Lane {
  void* sp;
  int state, op, line, flags;  // what it waits at
  unsigned parity;
  Ids ids;
};

Lane lanes[kMaxThreads];
Lane* current;

#if defined(__x86_64__) && !defined(MSL_UCONTEXT)
void* scheduler_sp;
extern "C" void msl_switch(void** save, void* to);
asm(".text\n.globl msl_switch\n.hidden msl_switch\nmsl_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
void resume(Lane& l) { msl_switch(&scheduler_sp, l.sp); }
void park() { msl_switch(&current->sp, scheduler_sp); }
void prepare(Lane& l, char* top, void (*entry)()) {
  void** sp = (void**)(top - 64);
  memset(sp, 0, 64);
  sp[6] = (void*)entry;
  l.sp = sp;
}
#else
ucontext_t contexts[kMaxThreads], scheduler_context;
void resume(Lane& l) { swapcontext(&scheduler_context, &contexts[&l - lanes]); }
void park() { swapcontext(&contexts[current - lanes], &scheduler_context); }
void prepare(Lane& l, char* top, void (*entry)()) {
  ucontext_t& c = contexts[&l - lanes];
  getcontext(&c);
  c.uc_stack.ss_sp = top - kStack;
  c.uc_stack.ss_size = kStack;
  c.uc_link = nullptr;
  makecontext(&c, entry, 0);
}
#endif
}  // namespace
