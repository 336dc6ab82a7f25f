// Attention of one new token per document over a KV cache, with the bits of torch's flash attention.
//
// A row of flash attention (FlashAttention 2, torch.ops.aten._flash_attention_forward) is a function of its query
// and its document's keys alone, so another kernel gives the same bits if it rounds at the same places:
//
//   - key blocks of N keys, counted from the document's first key, last block first
//   - scores and outputs by mma.m16n8k16, k ascending, float32 accumulators that start from zero
//   - p = exp2(score * (scale * log2(e)) - max * (scale * log2(e))), each product rounded, where max is the running
//     maximum
//   - the sum of p in four partial sums, of the columns 8 j + 2 t and 8 j + 2 t + 1 for t = 0 to 3, in ascending
//     order; a new block begins with fma(partial sum, exp2((old max - new max) * scale * log2(e)), first p)
//   - p rounded to the operands' type before it meets the values; one division at the end
//
// What flash attention computes besides is left out: it fills tiles of 128 queries, of which decode has one per
// head. Here the query heads that share a kv head are the (up to 8) rows of a tile. Four warps divide the keys of a
// key block for the scores, and the head's dimensions for the outputs; a fifth one adds up the probabilities.
//
// Grid (kv heads, documents), 160 threads. The compiler is told
//   ELEMENT  __nv_bfloat16 or __half;  MMA its name in PTX, bf16 or f16;  ROUND  float32 to it
//   H  dimensions of a head, 64 or 128;  N  keys of a key block;  GROUP  query heads per kv head;  K  kv heads
//   SCALE_LOG2  float32 of the softmax scale times log2(e)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define THREADS 160
#define LOWEST __int_as_float(0xff800000)  // minus infinity
#define ROWS 8
#define CHUNKS (H / 8)             // of 16 bytes in a key
#define TILE (N * H)               // elements of a key block
#define P_STRIDE (N + 8)           // of a row of probabilities: no two rows begin in the same bank
#define KEYS_PER_WARP (N / 4)
#define DIMS_PER_WARP (H / 4)

// Where chunk `chunk` of row `row` stands: neighbours in a column lie in other banks.
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * H + ((chunk & ~7) | ((chunk ^ row) & 7)) * 8;
}

__device__ __forceinline__ unsigned address_of(const void* shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

// 16 bytes from global to shared memory, without waiting; zeros where !real.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(shared)), "l"(global),
                 "r"(real ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address_of(shared)));
}

__device__ __forceinline__ void load_transposed(unsigned (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address_of(shared)));
}

// c += a b, where rows 8 to 15 of a are zeros: a0 holds columns 0 to 7, a2 columns 8 to 15.
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a2, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA "." MMA
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// Begin to copy a key block of this kv head. LAST: the row before `real` is `newest`, rows from there on become zeros.
template <bool LAST>
__device__ __forceinline__ void load_block(
    ELEMENT* shared, const ELEMENT* rows, int real, const ELEMENT* newest = nullptr) {
    if (threadIdx.x >= 128) return;
    const unsigned chunk = threadIdx.x % CHUNKS, top = threadIdx.x / CHUNKS;
    ELEMENT* to = shared + swizzled(top, chunk);  // 128 / CHUNKS rows further down it is the same column
    const ELEMENT* from = rows + top * (K * H) + chunk * 8;
#pragma unroll
    for (unsigned i = 0; i < N * CHUNKS / 128; i++) {
        const int at = top + i * (128 / CHUNKS);
        const bool inside = !LAST || at < real;
        const ELEMENT* row = from + (long long)i * (128 / CHUNKS) * (K * H);
        if (LAST && at == real - 1) row = newest + chunk * 8;
        copy_async(to + i * (128 / CHUNKS) * H, inside ? row : rows, inside);
    }
}

// Scores of this warp's keys of a key block, minus infinity behind the last of `left` keys; returns the row's maximum.
__device__ __forceinline__ float scores_of(
    float (&score)[KEYS_PER_WARP / 8][4], const unsigned (&query)[H / 16][2], const ELEMENT* keys, int left) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < H / 16; step++) {
#pragma unroll
        for (int pair = 0; pair < KEYS_PER_WARP / 16; pair++) {
            unsigned b[4];
            int key = warp * KEYS_PER_WARP + pair * 16 + lane / 16 * 8 + lane % 8;
            load_matrices(b, keys + swizzled(key, step * 2 + lane / 8 % 2));
            multiply(score[pair * 2], query[step][0], query[step][1], b[0], b[1]);
            multiply(score[pair * 2 + 1], query[step][0], query[step][1], b[2], b[3]);
        }
    }
    float largest = LOWEST;
#pragma unroll
    for (int tile = 0; tile < KEYS_PER_WARP / 8; tile++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (warp * KEYS_PER_WARP + tile * 8 + lane % 4 * 2 + j >= left) score[tile][j] = LOWEST;
            largest = fmaxf(largest, score[tile][j]);
        }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}

// Adds probabilities times values of a key block, of this warp's dimensions.
__device__ __forceinline__ void add_values(
    float (&output)[DIMS_PER_WARP / 8][4], const ELEMENT* probabilities, const ELEMENT* values) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < N / 16; step++) {
        const ELEMENT* p = probabilities + lane / 4 * P_STRIDE + step * 16 + lane % 4 * 2;
        const unsigned a0 = *(const unsigned*)p, a2 = *(const unsigned*)(p + 8);
#pragma unroll
        for (int pair = 0; pair < DIMS_PER_WARP / 16; pair++) {
            unsigned b[4];
            int chunk = warp * (DIMS_PER_WARP / 8) + pair * 2 + lane / 16;
            load_transposed(b, values + swizzled(step * 16 + lane % 16, chunk));
            multiply(output[pair * 2], a0, a2, b[0], b[1]);
            multiply(output[pair * 2 + 1], a0, a2, b[2], b[3]);
        }
    }
}

// q [documents, K * GROUP, H], k_new and v_new [documents, K, H], caches [rows, K, H], out as q.
// slots: the cache row of the new token; starts, used: the first row of the document, and its keys, the new one
// included.
extern "C" __global__ void __launch_bounds__(THREADS) attend_one(
    const ELEMENT* __restrict__ q, const ELEMENT* __restrict__ k_new, const ELEMENT* __restrict__ v_new,
    ELEMENT* k_cache, ELEMENT* v_cache, const long long* __restrict__ slots, const int* __restrict__ starts,
    const int* __restrict__ used, ELEMENT* __restrict__ out) {
    extern __shared__ __align__(128) unsigned char memory[];
    ELEMENT* keys = (ELEMENT*)memory;                          // [2][N][H]: one is read, the next is on its way
    ELEMENT* values = keys + 2 * TILE;                         // [2][N][H]
    ELEMENT* probabilities = values + 2 * TILE;                // [ROWS][P_STRIDE]
    float* exact = (float*)(probabilities + ROWS * P_STRIDE);  // [ROWS][P_STRIDE]: before rounding
    float* maxima = exact + ROWS * P_STRIDE;                   // [4][ROWS]
    float* sums = maxima + 4 * ROWS;                           // [ROWS]

    const int head = blockIdx.x, document = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, part = lane % 4;
    const int count = used[document], blocks = (count + N - 1) / N;

#if __CUDA_ARCH__ >= 900
    // The next kernel, a product that waits by itself for this one to end, may be launched.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const ELEMENT *k_own = k_new + (document * K + head) * H, *v_own = v_new + (document * K + head) * H;
    const long long last = ((long long)starts[document] + (blocks - 1) * N) * (K * H) + head * H;
    const ELEMENT *k_rows = k_cache + last, *v_rows = v_cache + last;
    if (blocks > 0) {
        load_block<true>(keys, k_rows, count - (blocks - 1) * N, k_own);
        commit();
        load_block<true>(values, v_rows, count - (blocks - 1) * N, v_own);
        commit();
    }
    // For later steps: this one takes the new key and value from where they are.
    if (threadIdx.x < 2 * CHUNKS) {
        const int chunk = threadIdx.x % CHUNKS;
        const ELEMENT* from = (threadIdx.x < CHUNKS ? k_own : v_own) + chunk * 8;
        ELEMENT* to = (threadIdx.x < CHUNKS ? k_cache : v_cache) + slots[document] * (K * H) + head * H + chunk * 8;
        *(uint4*)to = *(const uint4*)from;
    }
    unsigned query[H / 16][2];
#pragma unroll
    for (int i = 0; i < H / 8; i++) {
        const ELEMENT* from = q + ((document * K + head) * GROUP + row) * H + i * 8 + part * 2;
        query[i / 2][i % 2] = row < GROUP ? *(const unsigned*)from : 0u;
    }
    float output[DIMS_PER_WARP / 8][4] = {};
    float largest = LOWEST, sum = 0.f;  // of `row`; the sum is the fifth warp's, of a quarter of the columns a thread
    for (int block = blocks - 1, stage = 0; block >= 0; block--, stage ^= 1) {
        k_rows -= N * (K * H), v_rows -= N * (K * H);
        if (block > 0) load_block<false>(keys + (stage ^ 1) * TILE, k_rows, N);
        commit();
        if (block > 0) load_block<false>(values + (stage ^ 1) * TILE, v_rows, N);
        commit();
        wait<3>();
        __syncthreads();  // this block's keys are there

        float score[KEYS_PER_WARP / 8][4] = {};
        if (warp < 4) {
            const float here = scores_of(score, query, keys + stage * TILE, count - block * N);
            if (part == 0) maxima[warp * ROWS + row] = here;
        }
        __syncthreads();
        const float before = largest;
#pragma unroll
        for (int other = 0; other < 4; other++) largest = fmaxf(largest, maxima[other * ROWS + row]);
        const float shift = __fmul_rn(largest, SCALE_LOG2);
        const float rescale = exp2f(__fmul_rn(__fsub_rn(before, largest), SCALE_LOG2));
        if (warp < 4) {
#pragma unroll
            for (int tile = 0; tile < KEYS_PER_WARP / 8; tile++) {
                const int at = row * P_STRIDE + warp * KEYS_PER_WARP + tile * 8 + part * 2;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float p = exp2f(__fsub_rn(__fmul_rn(score[tile][j], SCALE_LOG2), shift));
                    exact[at + j] = p;
                    probabilities[at + j] = ROUND(p);
                }
            }
        }
        wait<2>();
        __syncthreads();  // the probabilities and this block's values are there

        if (warp < 4) {
#pragma unroll
            for (int tile = 0; tile < DIMS_PER_WARP / 8; tile++) {
                output[tile][0] = __fmul_rn(output[tile][0], rescale);
                output[tile][1] = __fmul_rn(output[tile][1], rescale);
            }
            add_values(output, probabilities, values + stage * TILE);
        } else {
            const float* p = exact + row * P_STRIDE + part * 2;
            sum = __fadd_rn(__fmaf_rn(sum, rescale, p[0]), p[1]);
#pragma unroll
            for (int tile = 1; tile < N / 8; tile++) sum = __fadd_rn(__fadd_rn(sum, p[tile * 8]), p[tile * 8 + 1]);
        }
        __syncthreads();  // the next block overwrites what was read here
    }

    if (warp == 4) {
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
        if (part == 0) sums[row] = sum;
    }
    __syncthreads();
    if (warp < 4 && row < GROUP) {
        const float factor = sums[row] == 0.f ? 1.f : 1.f / sums[row];  // 0: a document without keys
#pragma unroll
        for (int tile = 0; tile < DIMS_PER_WARP / 8; tile++) {
            ELEMENT* to = out + ((document * K + head) * GROUP + row) * H + warp * DIMS_PER_WARP + tile * 8 + part * 2;
            to[0] = ROUND(__fmul_rn(output[tile][0], factor));
            to[1] = ROUND(__fmul_rn(output[tile][1], factor));
        }
    }
}
