// A function is compiled for several kinds of CPU; the loader of the library takes the best that this CPU runs.
#pragma once
#include <stdint.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
