// CLONES compiles a function for several kinds of CPU; the loader of the library takes the best one that this CPU runs.
#pragma once
#include <stdint.h>

// clang before 18 calls such a function `function.ifunc`, so that no caller finds it.
#if defined(__x86_64__) && defined(__gnu_linux__) && (!defined(__clang__) || __clang_major__ >= 18)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
