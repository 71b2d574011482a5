// Calls that instrument.py puts before every access to device, constant and threadgroup memory. They are inlined.
#pragma once
#include "tally.h"

#define MSL_HOOK extern "C" inline __attribute__((used, always_inline, nodebug))

// `site` remembers which buffer an instruction touched last, which nearly always is the one it touches next.
MSL_HOOK void msl_touch(uintptr_t address, unsigned long bytes, unsigned* site, int way) {
  Tally* tally = &msl_tallies[*site];
  if (address - tally->lo >= tally->size || address - tally->lo + bytes > tally->size) {
    *site = msl_find(address, bytes);
    tally = &msl_tallies[*site];
  }
  tally->requested[way] += bytes;
  uintptr_t first = (address - tally->lo) >> 5, last = (address - tally->lo + bytes - 1) >> 5;
  for (uintptr_t sector = first; sector <= last; sector++)
    if (tally->stamp[way][sector] != msl_group) msl_first_touch(tally, sector, way);
  if (__builtin_expect(msl_find_races, 0)) msl_check_device(tally, address, bytes, way);
}
MSL_HOOK void msl_touch_group(uintptr_t address, unsigned long bytes, int way) {
  msl_group_traffic[way] += bytes;
  if (__builtin_expect(msl_find_races, 0)) msl_check_group(address, bytes, way);
}

#define MSL_SPACE(N) __attribute__((address_space(N))) const char*
MSL_HOOK void msl_read_1(MSL_SPACE(1) p, unsigned long n, unsigned* site) { msl_touch((uintptr_t)p, n, site, kRead); }
MSL_HOOK void msl_write_1(MSL_SPACE(1) p, unsigned long n, unsigned* site) { msl_touch((uintptr_t)p, n, site, kWrite); }
MSL_HOOK void msl_read_2(MSL_SPACE(2) p, unsigned long n, unsigned* site) { msl_touch((uintptr_t)p, n, site, kRead); }
MSL_HOOK void msl_read_3(MSL_SPACE(3) p, unsigned long n, unsigned*) { msl_touch_group((uintptr_t)p, n, kRead); }
MSL_HOOK void msl_write_3(MSL_SPACE(3) p, unsigned long n, unsigned*) { msl_touch_group((uintptr_t)p, n, kWrite); }
#undef MSL_SPACE
