// What levels are, for all that works on them.
#pragma once
#include <string.h>

#include "../../../formats/native/clones.h"

// Stand for an element equal to its prediction, and for one that is stored as it is.
enum { SAME = -32768, EXACT = 32767 };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
