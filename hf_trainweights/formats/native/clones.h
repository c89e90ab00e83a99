// A function is compiled for several kinds of CPU; the loader of the library takes the best that this CPU runs.
#pragma once
#include <stdint.h>

// clang before 18 gives such a function the name `function.ifunc`, by which nobody finds it.
#if defined(__x86_64__) && defined(__gnu_linux__) && (!defined(__clang__) || __clang_major__ >= 18)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
