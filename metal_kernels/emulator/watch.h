// Watches what an instrumented kernel touches: bytes moved, and races that no order of threads need reveal.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "tally.h"

constexpr int kMaxBuffers = 96, kMaxSites = 64;
enum Fault { kOutOfBounds = 1, kDiverged, kUndefined, kEndless, kOther, kRace, kLimit };
enum Space { kDevice = 0, kGroup = 1 };  // bits of mem_flags: 1 << space
constexpr int kWays[] = {kRead, kWrite}, kSpaces[] = {kDevice, kGroup};

struct Buffer { char name[64]; uintptr_t lo, hi; int32_t is_written; };
struct Traffic { uint64_t requested[2], group[2], distinct[2]; };

extern "C" {
Tally msl_tallies[kMaxBuffers];
uint64_t msl_group_traffic[2];
uint32_t msl_group;
bool msl_find_races;
unsigned msl_thread(void);
void msl_outside(const void* address, unsigned long bytes, uint64_t pc);
void msl_race(const void* address, uint64_t pc, uint64_t other_pc, const char* how, unsigned other_thread);
}

namespace {
int n_tallies;
uint8_t* seen_maps;
size_t seen_bytes;
struct Variable { uintptr_t lo, size; Cell* cells; } variables[kMaxSites];
void* (*new_memory)(size_t bytes);
// Counted up by barriers: what lies in different epochs is ordered.
uint32_t epoch[2] = {1, 1}, simd_epoch[kMaxSimds][2];

size_t sectors(const Buffer& b) { return (b.hi - b.lo + 31) / 32; }
uint64_t sector_bytes(uintptr_t size, uintptr_t sector) { return size - sector * 32 < 32 ? size - sector * 32 : 32; }

// Before the workers are forked: which sectors were touched is one map for all of them.
bool share_maps(const Buffer* ranges, int n) {
  if (n > kMaxBuffers) return false;
  seen_bytes = 1;
  for (int i = 0; i < n; i++) seen_bytes += 2 * sectors(ranges[i]);
  int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, seen_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (p == MAP_FAILED) return false;
  uint8_t* next = seen_maps = (uint8_t*)p;
  for (int i = 0; i < n; i++)
    for (int way : kWays) {
      msl_tallies[i].seen[way] = next;
      next += sectors(ranges[i]);
    }
  return true;
}

// In a worker. Memory is committed when touched, so inputs that are only read cost nothing for writes.
void start_watching(const Buffer* ranges, int n, bool find_races, void* (*allocate)(size_t)) {
  n_tallies = n;
  new_memory = allocate;
  msl_find_races = find_races;
  for (int i = 0; i < n; i++) {
    Tally& t = msl_tallies[i];
    t.lo = ranges[i].lo;
    t.size = ranges[i].hi - ranges[i].lo;
    for (int way : kWays) {
      t.requested[way] = t.group[way] = 0;
      t.stamp[way] = (uint32_t*)allocate(sectors(ranges[i]) * sizeof(uint32_t) + 1);
    }
    t.cells = find_races && ranges[i].is_written ? (Cell*)allocate(t.size * sizeof(Cell) + 1) : nullptr;
  }
  msl_group_traffic[kRead] = msl_group_traffic[kWrite] = 0;
}

void watch_variable(int site, uintptr_t base, size_t bytes) {
  if (!msl_find_races) return;
  variables[site] = {base, bytes, (Cell*)new_memory(bytes * sizeof(Cell))};
}

void start_group(uint64_t group) {
  msl_group = (uint32_t)group + 1;
  epoch[kDevice]++;
  epoch[kGroup]++;
}
void group_synchronised(int flags) {
  for (int space : kSpaces) epoch[space] += flags >> space & 1;
}
void simd_synchronised(int simd, int flags) {
  for (int space : kSpaces) simd_epoch[simd][space] += flags >> space & 1;
}

// When a worker is done.
void add_traffic(Traffic* total, int n) {
  for (int way : kWays) {
    for (int i = 0; i < n; i++) {
      __atomic_fetch_add(&total[i].requested[way], msl_tallies[i].requested[way], __ATOMIC_RELAXED);
      __atomic_fetch_add(&total[i].group[way], msl_tallies[i].group[way], __ATOMIC_RELAXED);
    }
    __atomic_fetch_add(&total[n].requested[way], msl_group_traffic[way], __ATOMIC_RELAXED);
  }
}

// When all workers are done.
void finish_traffic(Traffic* total, const Buffer* ranges, int n) {
  for (int i = 0; i < n; i++)
    for (int way : kWays)
      for (size_t s = 0; s < sectors(ranges[i]); s++)
        if (msl_tallies[i].seen[way][s]) total[i].distinct[way] += sector_bytes(ranges[i].hi - ranges[i].lo, s);
  munmap(seen_maps, seen_bytes);
}

// ---- races: two threads touch a byte, one of them writes, and no barrier lies between
bool unordered(uint32_t then, uint32_t then_simd, unsigned thread, Space space) {
  unsigned me = msl_thread(), simd = me / 32;
  return thread != me && then == epoch[space] && (thread / 32 != simd || then_simd == simd_epoch[simd][space]);
}

void check_write(Cell& c, const void* address, uint64_t pc, Space space) {
  if (c.read_epoch) {
    if (space == kDevice && (c.many_groups || c.read_group != msl_group))
      msl_race(address, pc, c.read_pc, "written, and read in another threadgroup by", c.read_thread);
    unsigned simd = msl_thread() / 32;
    bool same_epoch = c.read_epoch == epoch[space];
    bool peers = c.many_simds || (c.many_threads && c.read_thread / 32 == simd &&
                                  c.read_simd_epoch == simd_epoch[simd][space]);
    if ((same_epoch && peers) || unordered(c.read_epoch, c.read_simd_epoch, c.read_thread, space))
      msl_race(address, pc, c.read_pc, "written, and read with no barrier between by", c.read_thread);
  }
  c.write_group = msl_group;
  c.write_epoch = epoch[space];
  c.write_simd_epoch = simd_epoch[msl_thread() / 32][space];
  c.write_thread = msl_thread();
  c.write_pc = pc;
}

void note_read(Cell& c, uint64_t pc, Space space) {
  unsigned me = msl_thread(), simd = me / 32;
  bool before = c.read_epoch == epoch[space] && c.read_group == msl_group;
  bool same_simd = before && c.read_thread / 32 == simd;
  bool same_moment = same_simd && c.read_simd_epoch == simd_epoch[simd][space];
  c.many_groups = c.many_groups || (c.read_epoch && c.read_group != msl_group);
  c.many_simds = before && (c.many_simds || !same_simd);
  c.many_threads = same_moment && (c.many_threads || c.read_thread != me);
  c.read_group = msl_group;
  c.read_epoch = epoch[space];
  c.read_simd_epoch = simd_epoch[simd][space];
  c.read_thread = me;
  c.read_pc = pc;
}

void check(Cell& c, const void* address, int way, uint64_t pc, Space space) {
  const char* how = way == kWrite ? "written, and written before with no barrier between by"
                                  : "read, and written before with no barrier between by";
  if (c.write_epoch) {
    if (space == kDevice && c.write_group != msl_group)
      msl_race(address, pc, c.write_pc, way == kWrite ? "written, and written in another threadgroup by"
                                                      : "read, and written in another threadgroup by", c.write_thread);
    if (unordered(c.write_epoch, c.write_simd_epoch, c.write_thread, space))
      msl_race(address, pc, c.write_pc, how, c.write_thread);
  }
  if (way == kWrite) check_write(c, address, pc, space);
  else note_read(c, pc, space);
}
}  // namespace

extern "C" {
unsigned msl_find(uintptr_t address, unsigned long bytes) {
  for (int i = 0; i < n_tallies; i++) {
    const Tally& t = msl_tallies[i];
    if (address >= t.lo && address - t.lo + bytes <= t.size) return i;
  }
  msl_outside((const void*)address, bytes, (uint64_t)__builtin_return_address(0) - 1);
  return 0;
}

void msl_first_touch(Tally* t, uintptr_t sector, int way) {
  t->stamp[way][sector] = msl_group;
  t->group[way] += sector_bytes(t->size, sector);
  t->seen[way][sector] = 1;
}

void msl_check_device(Tally* t, uintptr_t address, unsigned long bytes, int way) {
  if (!t->cells) return;
  uint64_t pc = (uint64_t)__builtin_return_address(0) - 1;
  for (uintptr_t a = address; a < address + bytes; a++)
    check(t->cells[a - t->lo], (const void*)a, way, pc, kDevice);
}

void msl_check_group(uintptr_t address, unsigned long bytes, int way) {
  uint64_t pc = (uint64_t)__builtin_return_address(0) - 1;
  for (const Variable& v : variables)
    if (v.cells && address >= v.lo && address - v.lo + bytes <= v.size)
      for (uintptr_t a = address; a < address + bytes; a++)
        check(v.cells[a - v.lo], (const void*)a, way, pc, kGroup);
}

// Atomics order themselves, so they race with nothing.
void msl_count_atomic(const void* address, unsigned long bytes, bool reads, bool writes) {
  const bool does[] = {reads, writes};
  uintptr_t a = (uintptr_t)address;
  int found = 0;
  while (found < n_tallies && a - msl_tallies[found].lo >= msl_tallies[found].size) found++;
  for (int way : kWays) {
    if (!does[way]) continue;
    if (found == n_tallies) {
      msl_group_traffic[way] += bytes;
      continue;
    }
    Tally& t = msl_tallies[found];
    t.requested[way] += bytes;
    uintptr_t sector = (a - t.lo) >> 5;
    if (t.stamp[way][sector] != msl_group) msl_first_touch(&t, sector, way);
  }
}
}
