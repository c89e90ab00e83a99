// Shared by levels.c and symbols.c. A level is the integer that a lossy codec rounds an element to (see levels.py).
#pragma once
#include <string.h>

#include "../../../formats/native/clones.h"

// Numbers in arrays of levels that are no levels: the element equals its prediction, or is stored as it is.
enum { SAME = -32768, EXACT = 32767 };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
