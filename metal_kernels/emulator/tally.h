// What an instrumented kernel and the runtime share: one tally for each buffer, found again by address.
#pragma once
#include <stdint.h>

enum { kRead = 0, kWrite = 1 };
constexpr int kMaxThreads = 1024, kMaxSimds = kMaxThreads / 32;  // of a threadgroup

struct Cell {  // who touched a byte last; an epoch of 0 is never
  uint64_t write_pc, read_pc;
  uint32_t write_group, write_epoch, write_simd_epoch, read_group, read_epoch, read_simd_epoch;
  uint16_t write_thread, read_thread;
  bool many_threads, many_simds, many_groups;  // of readers, within the epochs above
};

struct Tally {
  uintptr_t lo, size;
  uint64_t requested[2];  // bytes, summed over threads
  uint64_t group[2];      // bytes in distinct sectors of 32, summed over threadgroups
  uint32_t* stamp[2];     // for each sector, the last threadgroup that touched it
  uint8_t* seen[2];       // for each sector, whether any threadgroup of any worker touched it
  Cell* cells;            // for each byte, when races are looked for and the buffer is an output
};

extern "C" {
extern Tally msl_tallies[];
extern uint64_t msl_group_traffic[2];  // bytes of threadgroup memory requested
extern uint32_t msl_group;             // number of the running threadgroup, from 1
extern bool msl_find_races;
unsigned msl_find(uintptr_t address, unsigned long bytes);
void msl_first_touch(Tally* tally, uintptr_t sector, int way);
void msl_check_device(Tally* tally, uintptr_t address, unsigned long bytes, int way);
void msl_check_group(uintptr_t address, unsigned long bytes, int way);
void msl_count_atomic(const void* address, unsigned long bytes, bool reads, bool writes);
}
