// The instructions that products on a GPU name, in plain C++: a block of threads on a CPU. Every thread is a fiber, which
// waits where its warp or its block has to meet.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

typedef uint8_t uint8;
typedef uint16_t uint16;
typedef uint32_t uint32;
using std::max;
using std::min;

#define KERNEL static void
#define DEVICE static inline
#define SHARED static
#define UNROLL

struct Place {
    int x = 0, y = 0;
};
static Place threadIdx, blockIdx;
// Loads of codes and of x from addresses that a GPU's wide loads do not take.
static long misaligned;

enum Wait { RUNS, FOR_WARP, FOR_BLOCK, DONE };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Wait wait;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static uint32 shown[64][32][6];  // the registers that the lanes of each warp show each other

static void wait_until(Wait wait) {
    fibers[current].wait = wait;
    swapcontext(&fibers[current].context, &scheduler);
}
static inline void wait_for_block() { wait_until(FOR_BLOCK); }

template <int COUNT> static void load(uint32 (&words)[COUNT], const void *address) {
    if ((uintptr_t)address % sizeof(words)) ++misaligned;
    memcpy(words, address, sizeof(words));
}
static inline void load_codes(uint32 (&words)[4], const void *address, bool is_there) {
    if (is_there) load(words, address);
}
template <int COUNT> static void load_numbers(uint32 (&pairs)[COUNT], const void *address, bool is_there) {
    memset(pairs, 0, sizeof(pairs));
    if (is_there) load(pairs, address);
}

static inline uint32 and_or(uint32 bits, uint32 mask, uint32 other) { return (bits & mask) | other; }
static inline uint32 pick_bytes(uint32 low, uint32 high, uint32 selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32 digit = selector >> (4 * i) & 15;
        uint32 byte = bytes >> (8 * (digit & 7)) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}

static inline float float_of_bits(uint32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32 bits_of_float(float value) {
    uint32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float float_of_half(uint16 bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return half;
}
static inline double number(uint16 bits) { return HALF ? float_of_half(bits) : float_of_bits((uint32)bits << 16); }

// To the nearest number of 16 bits, ties to the even one: rounded once, even of a double.
static inline uint16 round_number(double value) {
#if HALF
    const _Float16 half = value;
    uint16 bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    if (value != value) return 0x7FFF;
    if (value == 0 || std::isinf(value)) return bits_of_float(value) >> 16;
    int exponent;
    std::frexp(value, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));
    return bits_of_float(std::nearbyint(value / unit) * unit) >> 16;
#endif
}

static inline uint32 multiply_add(uint32 a, uint32 b, uint32 c) {
    uint32 result = 0;
    for (int i = 0; i < 32; i += 16)
        result |= (uint32)round_number(number(a >> i) * number(b >> i) + number(c >> i)) << i;
    return result;
}

static inline void multiply_tile(float (&c)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    memcpy(shown[warp][lane], a, sizeof(a));
    memcpy(shown[warp][lane] + 4, b, sizeof(b));
    wait_until(FOR_WARP);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const uint32 first = shown[warp][row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const uint32 second = shown[warp][column * 4 + k % 8 / 2][4 + k / 8];
            sum += number(first >> (16 * (k % 2))) * number(second >> (16 * (k % 2)));
        }
        c[i] = sum;
    }
    wait_until(FOR_WARP);
}

static inline uint32 exchange(uint32 value, int distance) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    shown[warp][lane][0] = value;
    wait_until(FOR_WARP);
    const uint32 result = shown[warp][lane ^ distance][0];
    wait_until(FOR_WARP);
    return result;
}

static void (*body)();
static void run_body() {
    body();
    wait_until(DONE);
}

// Let the fibers go on that have met: false if there are none.
static bool wake(int first, int count, Wait met) {
    for (int i = first; i < first + count; ++i)
        if (fibers[i].wait != met && !(met == FOR_BLOCK && fibers[i].wait == DONE)) return false;
    bool woke = false;
    for (int i = first; i < first + count; ++i)
        if (fibers[i].wait == met) fibers[i].wait = RUNS, woke = true;
    return woke;
}

static void run_block(int threads, void (*function)()) {
    body = function;
    fibers.resize(threads);
    for (Fiber &fiber : fibers) {
        fiber.stack.resize(1 << 16);
        fiber.wait = RUNS;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, run_body, 0);
    }
    for (bool goes_on = true; goes_on;) {
        for (current = 0; current < threads; ++current)
            if (fibers[current].wait == RUNS) {
                threadIdx.x = current;
                swapcontext(&scheduler, &fibers[current].context);
            }
        goes_on = wake(0, threads, FOR_BLOCK);
        for (int warp = 0; warp < threads / 32; ++warp) goes_on |= wake(32 * warp, 32, FOR_WARP);
    }
    for (const Fiber &fiber : fibers)
        if (fiber.wait != DONE) {
            fprintf(stderr, "a thread waits for ever\n");
            abort();
        }
}
