/* Words of Philox4x32-10 for a strided part of a stream: see philox.py, which does the same with tensors where there is no compiler. */

#include <stdint.h>
#include <string.h>

#define ROUNDS 10
#define TOGETHER 64 /* blocks made at a time, lane by lane, so that a compiler makes vectors of them */

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

CLONES static void blocks(uint64_t first, int n, uint64_t key, uint64_t upper, uint32_t *out) {
    uint32_t c0[TOGETHER], c1[TOGETHER], c2[TOGETHER], c3[TOGETHER];
    for (int i = 0; i < n; i++) {
        uint64_t counter = first + (uint64_t)i;
        c0[i] = (uint32_t)counter;
        c1[i] = (uint32_t)(counter >> 32);
        c2[i] = (uint32_t)upper;
        c3[i] = (uint32_t)(upper >> 32);
    }
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < n; i++) {
            uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)b;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)a;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < n; i++) {
        out[4 * i] = c0[i];
        out[4 * i + 1] = c1[i];
        out[4 * i + 2] = c2[i];
        out[4 * i + 3] = c3[i];
    }
}

/* The runs of `run` neighbours that counting through `sizes` with `strides` begins, one after another. */
void ftp_random_bits(
    int64_t key, int64_t upper, int64_t offset, int dims, const int64_t *sizes, const int64_t *strides, int64_t run, uint32_t *out) {
    uint32_t words[4 * TOGETHER];
    int64_t rows = 1;
    for (int d = 0; d < dims; d++)
        rows *= sizes[d];
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = offset, left = row;
        for (int d = dims - 1; d >= 0; d--) {
            at += left % sizes[d] * strides[d];
            left /= sizes[d];
        }
        for (int64_t end = at + run; at < end;) {
            int64_t first = at >> 2, needed = ((end - 1) >> 2) - first + 1;
            int n = needed < TOGETHER ? (int)needed : TOGETHER;
            blocks((uint64_t)first, n, (uint64_t)key, (uint64_t)upper, words);
            int64_t skip = at - 4 * first, count = 4 * n - skip;
            count = count < end - at ? count : end - at;
            memcpy(out, words + skip, 4 * (size_t)count);
            out += count;
            at += count;
        }
    }
}

/* The four words of one counter. */
void ftp_random_block(int64_t key, int64_t upper, int64_t counter, uint32_t *out) {
    blocks((uint64_t)counter, 1, (uint64_t)key, (uint64_t)upper, out);
}
