// One product of a recurrent step on Hopper, with the pointwise work that follows it in the epilogue.
//
//   D[b, n] = sum_k A[row + b, k] W'[n, k],   W' = W (rows are n) or its transpose (W_MN: rows are k)
//
// A warp of its own asks the copy engine for tiles; WGM x WGN warpgroups multiply them. The CM CTAs of a
// cluster that have the same columns share W's tile: each asks for its part and sends it to all. CS CTAs share
// K: each adds up a part of the tile from all of them.
// EIGHT: A and W are 8-bit numbers, each its number times a scale; the sums are multiplied by what undoes both.
// No header is included, so that NVRTC needs none.
//
// Given as macros: BM BN WGM WGN STAGES CM CS W_MN EPI UNIT HAS_MASK HAS_B SAVE C_EARLY AHEAD STREAM INDEXED XF32
// EIGHT, and the function wgmma() for WN columns (ops/cuda_source.py).

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map {
  u64 words[16];
};

struct Args {
  Map A, W;
  const void *x0, *x1, *x2, *x3, *x4, *x5;  // what the epilogue reads, see there
  void *y0, *y1, *y2;                       // what it writes
  void *y8;                                 // EIGHT: the next product's A
  int *fault;                               // set to 1 by whoever waits in vain
  const int *rows;                          // rows of the strided input, where they are not those of A (INDEXED)
  int row;                                  // A's first row
  int B, N;                                 // rows and columns of the result
  int blocks;                               // K in blocks of BK
  int stride_x, stride_y;                   // rows of the strided input and output
  float undo, scale;                        // EIGHT: of the sums; of y8
  const float *factor;                      // EIGHT: a further factor of the sums, or null
};

// EPI and UNIT (a place in ops/reference.py's UNITS)
#define SUMS 0
#define M_FORWARD 1
#define GATES 2
#define M_BACKWARD 3
#define CELL_BACKWARD 4
#define STANDARD 0
#define INITIAL 1

constexpr int BK = EIGHT ? 128 : 64;  // 128 bytes
constexpr int WN = BN / WGN;
constexpr int J = WN / 8;  // blocks of 8 columns in a thread's sums
constexpr int GROUPS = WGM * WGN;
constexpr int CONSUMERS = GROUPS * 128;
constexpr int CLUSTER = CM * CS;
constexpr int A_BYTES = BM * 128, W_BYTES = BN * 128;
constexpr int STAGE_BYTES = A_BYTES + W_BYTES;
// What a thread finishes: with CS > 1 one of its two rows, and 2 / CS of its columns.
constexpr int ROWS = CS > 1 ? 1 : 2;
constexpr int PARTS = CS > 1 ? CS / 2 : 1;
constexpr int JF = J / PARTS;
constexpr int P = JF / 2;    // blocks of 16 columns
constexpr int X_WORDS = XF32 ? JF * 2 : JF;               // words a thread sends to one other CTA
constexpr int X_BYTES = X_WORDS * 4 * CONSUMERS;
static_assert(BM == 64 * WGM && BN == WN * WGN && WN % 16 == 0 && J % PARTS == 0 && JF % 2 == 0, "");
static_assert(CS == 1 || X_WORDS % 4 == 0, "");
static_assert(EPI != GATES || JF % 8 == 0, "");
static_assert(AHEAD || EPI == SUMS || (EPI == GATES && CS == 1), "");
static_assert(!W_MN || (WN % 64 == 0 && !EIGHT), "");
static_assert(A_BYTES % 1024 == 0 && W_BYTES % 1024 == 0, "");

// ---- machine instructions

__device__ __forceinline__ u32 shared_address(const void *p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ u32 in_cta(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void barrier_arrive_at(u32 bar, u32 rank) {
  // Not .release.cluster: that costs a fence over the whole chip each time, and the products, which alone have
  // read the tile, are already done.
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_cta(bar, rank)) : "memory");
}

// AFAR: what another CTA's threads have stored is then seen. Whoever has waited in vain for about a second says so
// and goes on; after that nobody waits long.
template <bool AFAR = false>
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity, int *fault) {
  u32 done = 0;
  long long start = 0;
  while (true) {
    if (AFAR)
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    else
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    if (done) return;
    const long long now = clock64();
    if (start == 0) start = now;
    if (now - start > 1000000 && *(volatile int *)fault) return;
    if (now - start > 2000000000) {
      *(volatile int *)fault = 1;
      return;
    }
  }
}

// What L2 does with a tile: keep it as long as others, or let it go first.
constexpr u64 NORMAL = 0x1000000000000000ull, FIRST_OUT = 0x12f0000000000000ull;
constexpr u64 W_STAYS = STREAM ? FIRST_OUT : NORMAL;

__device__ __forceinline__ void load_tile(u32 to, const Map *map, int c0, int c1, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(bar), "l"(policy) : "memory");
}

__device__ __forceinline__ void load_tile_for(
    unsigned short ctas, u32 to, const Map *map, int c0, int c1, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5, %6;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(bar), "h"(ctas), "l"(policy) : "memory");
}

// A descriptor is fetched at its first use, unless it is asked for.
__device__ __forceinline__ void ask_for_map(const Map *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// A descriptor: bits 0..13 start, 16..29 leading byte offset, 32..45 stride byte offset, all / 16; 62..63 the
// swizzle: 1 for 128 bytes. K-major: rows of 128 bytes, 8 rows to the next block; leading is not used.
// MN-major (W's rows are k): chunks of 64 columns, in each BK rows; leading: to the next chunk, stride: 8 rows on.
constexpr u32 CHUNK = BK * 128, ROWS_8 = 8 * 128;
constexpr u32 A_HIGH = 1u << 30 | 1024 >> 4, A_LOW = 1 << 16;
constexpr u32 W_HIGH = W_MN ? 1u << 30 | ROWS_8 >> 4 : A_HIGH;
constexpr u32 W_LOW = W_MN ? CHUNK >> 4 << 16 : A_LOW;
constexpr u32 W_STEP = W_MN ? 16 * 128 >> 4 : 2;  // one instruction's k further on, / 16: else 32 bytes

/*WGMMA*/

// ---- numbers

__device__ __forceinline__ u32 bf16x2(float a, float b) {  // a in the low half
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ u32 fp16x2(float a, float b) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float bf16_low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float fp16_low(u32 x) {
  float r;
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ float fp16_high(u32 x) {
  float r;
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ float quick_tanh(float x) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float quick_sigmoid(float x) { return 0.5f * quick_tanh(0.5f * x) + 0.5f; }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float tanh_(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// Loads keep their order with the waits; nothing here is read twice, so nothing is kept in L1.
__device__ __forceinline__ uint2 load2(const void *p, bool inside) {
  uint2 v = make_uint2(0, 0);
  if (inside)
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store2(void *p, uint2 v, bool inside) {
  if (inside) asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
// Four bf16 numbers, as to_memory() gives them, times a scale, as four of 8 bits; too large ones become the largest.
__device__ __forceinline__ void store_e4m3(void *p, uint2 v, float scale, bool inside) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(bf16_high(v.x) * scale), "f"(bf16_low(v.x) * scale));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(bf16_high(v.y) * scale), "f"(bf16_low(v.y) * scale));
  if (inside) asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"((u32)high << 16 | low) : "memory");
}
__device__ __forceinline__ float2 as_floats(uint2 v) {
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
__device__ __forceinline__ uint2 as_words(float a, float b) {
  return make_uint2(__float_as_uint(a), __float_as_uint(b));
}

// A thread of a quad holds columns 2q, 2q + 1 of two neighbouring blocks of 8, as two words of 16-bit numbers.
// Memory wants 4 columns of one block: 16 columns of a row are then one access of 32 bytes of a quad.
// Word (q & 1, q >> 1): block q & 1, columns 4 (q >> 1) ..
__device__ __forceinline__ uint2 to_memory(u32 low, u32 high, bool odd) {
  u32 got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
  return odd ? make_uint2(got, high) : make_uint2(low, got);
}
__device__ __forceinline__ uint2 from_memory(uint2 v, bool odd) {
  u32 got = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.y, 1);
  return odd ? make_uint2(got, v.y) : make_uint2(v.x, got);
}

// ---- the kernel

struct Place {
  int b[ROWS];      // rows of the result
  bool in[ROWS];
  int x[ROWS];      // rows of the strided input
  int n;            // first of JF * 8 columns
  int q;            // thread of its quad
  bool odd;
  int wide;         // where a thread's 4 columns of 16 begin
};

#include "epilogues.h"

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) step_product(const __grid_constant__ Args args) {
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 1];
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;
  const u32 exchange = ring + STAGES * STAGE_BYTES;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES, arrived = empty + 8 * STAGES;
  const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  const int cx = blockIdx.x % CM, cz = blockIdx.z % CS;
  const int tile_m = blockIdx.x * BM, tile_n = blockIdx.y * BN;
  const int each = (args.blocks + gridDim.z - 1) / gridDim.z;
  const int first = blockIdx.z * each;
  const int count = min(each, args.blocks - first);

  if (thread == CONSUMERS) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, CM * GROUPS * 4);
    }
    if (CS > 1) {
      barrier_init(arrived, 1);
      barrier_expect(arrived, (CS - 1) * X_BYTES);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  } else if (thread == CONSUMERS + 1) {
    ask_for_map(&args.W);
    ask_for_map(&args.A);
  }
  __syncwarp();
  if (CLUSTER > 1) {  // no fence over all memory here: the barriers' own has been made
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    __syncthreads();
  }

  if (warp >= GROUPS * 4) {  // the loading warp
    if (thread == CONSUMERS) {
      unsigned short sharing = 0;
      for (int x = 0; x < CM; x++) sharing |= 1 << (x + CM * cz);
      auto load_A = [&](int i, int s) {
        const int k = (first + i) * BK;
        load_tile(ring + s * STAGE_BYTES, &args.A, k, args.row + tile_m, full + 8 * s, NORMAL);
      };
      auto load_W = [&](int i, int s) {
        const int k = (first + i) * BK;
        const u32 to = ring + s * STAGE_BYTES + A_BYTES, bar = full + 8 * s;
        if (W_MN) {
#pragma unroll
          for (int c = 0; c < BN / 64; c++) {  // chunks of 64 columns, each of BK rows; a part is BK / CM rows
            const u32 at = to + c * CHUNK + cx * (CHUNK / CM);
            if (CM == 1) load_tile(at, &args.W, tile_n + c * 64, k, bar, W_STAYS);
            else load_tile_for(sharing, at, &args.W, tile_n + c * 64, k + cx * (BK / CM), bar, W_STAYS);
          }
        } else {
          const u32 at = to + cx * (W_BYTES / CM);
          if (CM == 1) load_tile(at, &args.W, k, tile_n, bar, W_STAYS);
          else load_tile_for(sharing, at, &args.W, k, tile_n + cx * (BN / CM), bar, W_STAYS);
        }
      };
      const int ahead = min(STAGES, count);
      for (int i = 0; i < ahead; i++) {  // weights depend on no kernel
        barrier_expect(full + 8 * i, STAGE_BYTES);
        load_W(i, i);
      }
      wait_for_kernel_before();
      let_next_kernel_start();
      for (int i = 0; i < ahead; i++) load_A(i, i);
      int s = 0, parity = 0;
      for (int i = STAGES; i < count; i++) {
        barrier_wait(empty + 8 * s, parity, args.fault);
        barrier_expect(full + 8 * s, STAGE_BYTES);
        load_W(i, s);
        load_A(i, s);
        if (++s == STAGES) s = 0, parity ^= 1;
      }
      // Nobody leaves while another may still say that a tile is free: all but the last block's are awaited.
      for (int i = max(count - STAGES, 0); CM > 1 && i < count - 1; i++) {
        barrier_wait(empty + 8 * s, parity, args.fault);
        if (++s == STAGES) s = 0, parity ^= 1;
      }
    }
    return;
  }

  const int group = warp / 4, group_m = group % WGM, group_n = group / WGM;
  Place place;
  {
    const int row = tile_m + group_m * 64 + (warp % 4) * 16 + lane / 4;
    for (int r = 0; r < ROWS; r++) {
      place.b[r] = row + (CS > 1 ? 8 * (cz & 1) : 8 * r);
      place.in[r] = place.b[r] < args.B;
      place.x[r] = INDEXED && place.in[r] ? args.rows[place.b[r]] : place.b[r];
    }
    place.n = tile_n + group_n * WN + (cz >> 1) * JF * 8;
    place.q = lane % 4;
    place.odd = lane & 1;
    place.wide = (lane & 1) * 8 + ((lane >> 1) & 1) * 4;
  }
  Epilogue epilogue;
  epilogue.before(args, place);
  wait_for_kernel_before();
  epilogue.after(args, place);

  float acc[WN / 2];
#pragma unroll
  for (int i = 0; i < WN / 2; i++) acc[i] = 0.0f;
  {
    const u32 a_0 = ring + group_m * 64 * 128;
    const u32 w_0 = ring + A_BYTES + group_n * WN * 128;
    int s = 0, parity = 0;
    for (int i = 0; i < count; i++) {
      barrier_wait(full + 8 * s, parity, args.fault);
      // In a cluster an address of shared memory has the CTA's rank in its upper bits.
      const u32 a = A_LOW | ((a_0 + s * STAGE_BYTES) & 0x3ffff) >> 4;
      const u32 w = W_LOW | ((w_0 + s * STAGE_BYTES) & 0x3ffff) >> 4;
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma(acc, a + k * 2, w + k * W_STEP, i + k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i > 0) {  // the products of the block before are done: its tiles may be replaced
        const u32 bar = empty + 8 * (s == 0 ? STAGES - 1 : s - 1);
        if (CM == 1) {
          if (lane == 0) barrier_arrive(bar);
        } else if (lane < CM) {
          barrier_arrive_at(bar, lane + CM * cz);
        }
      }
      if (++s == STAGES) s = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WN / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
  }

  float sums[ROWS][JF * 2];
  if (CS == 1) {
    epilogue.between(args, place);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int j = 0; j < JF; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) sums[r][j * 2 + e] = acc[j * 4 + r * 2 + e];
  } else {
    // To each CTA its part, into the place that belongs to the distance (exclusive or) of the two.
    const int mine = cz;
#pragma unroll
    for (int t = 0; t < CS; t++) {
      float part[JF * 2];
#pragma unroll
      for (int j = 0; j < JF; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) part[j * 2 + e] = acc[((t >> 1) * JF + j) * 4 + (t & 1) * 2 + e];
      if (t == mine) {
#pragma unroll
        for (int i = 0; i < JF * 2; i++) sums[0][i] = part[i];
      } else {
        const u32 to = in_cta(exchange + ((t ^ mine) - 1) * X_BYTES + thread * 16, cx + CM * t);
        const u32 bar = in_cta(arrived, cx + CM * t);
#pragma unroll
        for (int i = 0; i < X_WORDS; i += 4) {
          u32 v[4];
#pragma unroll
          for (int e = 0; e < 4; e++)
            v[e] = XF32 ? __float_as_uint(part[i + e]) : bf16x2(part[(i + e) * 2 % (JF * 2)], part[((i + e) * 2 + 1) % (JF * 2)]);
          const u32 at = to + i / 4 * CONSUMERS * 16;
          asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                       ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(bar) : "memory");
        }
      }
    }
    epilogue.between(args, place);
    barrier_wait<true>(arrived, 0, args.fault);
#pragma unroll
    for (int d = 1; d < CS; d++) {
#pragma unroll
      for (int i = 0; i < X_WORDS; i += 4) {
        u32 v[4];
        asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(exchange + (d - 1) * X_BYTES + thread * 16 + i / 4 * CONSUMERS * 16) : "memory");
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (XF32) {
            sums[0][i + e] += __uint_as_float(v[e]);
          } else {
            sums[0][(i + e) * 2 % (JF * 2)] += bf16_low(v[e]);
            sums[0][((i + e) * 2 + 1) % (JF * 2)] += bf16_high(v[e]);
          }
        }
      }
    }
  }
  if (EIGHT) {
    const float undo = args.factor ? args.undo * *args.factor : args.undo;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < JF * 2; i++) sums[r][i] *= undo;
  }
  epilogue.finish(args, place, sums);
}
