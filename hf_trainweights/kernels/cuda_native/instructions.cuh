// The instructions that products name, for a GPU of compute capability 8.0 or above. HALF chooses float16 or bfloat16.
#pragma once

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;

#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__
#define UNROLL _Pragma("unroll")

#if HALF
#define PAIR "f16x2"
#define NUMBER "f16"
#else
#define PAIR "bf16x2"
#define NUMBER "bf16"
#endif

// Replaces the words by 16 bytes of codes, or leaves them. They are read once and need not evict x from the caches.
DEVICE void load_codes(uint32 (&words)[4], const void *address, bool is_there) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0;"
                 "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
                 : "l"(address), "r"((int)is_there));
}

// Loads pairs of numbers of x, or zeros where there are none. A branch would compute each address anew.
DEVICE void load_numbers(uint32 (&pairs)[4], const void *address, bool is_there) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 "@p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "l"(address), "r"((int)is_there));
}
DEVICE void load_numbers(uint32 (&pairs)[2], const void *address, bool is_there) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0;"
                 "@p ld.global.nc.v2.u32 {%0,%1}, [%2];}"
                 : "=r"(pairs[0]), "=r"(pairs[1])
                 : "l"(address), "r"((int)is_there));
}

// bits & mask | other. The compiler would take two instructions.
DEVICE uint32 and_or(uint32 bits, uint32 mask, uint32 other) {
    uint32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(bits), "r"(mask), "r"(other));
    return result;
}

// Four of eight bytes: those of `low` are 0 to 3, those of `high` 4 to 7, and each digit of the selector names one.
DEVICE uint32 pick_bytes(uint32 low, uint32 high, uint32 selector) { return __byte_perm(low, high, selector); }

// a * b + c of pairs of 16-bit numbers, rounded once.
DEVICE uint32 multiply_add(uint32 a, uint32 b, uint32 c) {
    uint32 result;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// c += a b: a has 16 rows of the weight, b 8 columns for rows of x, and they share 16 numbers.
DEVICE void multiply_tile(float (&c)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NUMBER "." NUMBER ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE uint32 exchange(uint32 value, int distance) { return __shfl_xor_sync(~0u, value, distance); }

DEVICE void wait_for_block() { __syncthreads(); }

DEVICE float float_of_bits(uint32 bits) { return __uint_as_float(bits); }
DEVICE uint32 bits_of_float(float value) { return __float_as_uint(value); }

DEVICE float float_of_half(uint16 bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}

DEVICE uint16 round_number(float value) {
    uint16 bits;
    asm("cvt.rn." NUMBER ".f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
