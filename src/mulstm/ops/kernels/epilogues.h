// What follows a product. before(): loads that depend on no kernel, or on one two kernels ago. after(): those
// that depend on the kernel before. between(): those that wait until the product is done. finish(): from the sums
// to memory. Shuffles stand outside all conditions.

__device__ __forceinline__ void prefetch(const void *p, bool inside) {
  if (inside) asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Row r of a matrix from this thread's first column on; what is added to it afterwards is a constant, which the
// machine adds for nothing. 16-bit numbers are taken 4 at a time (wide), 32-bit ones 2 at a time (pair).
__device__ __forceinline__ char *wide(const void *x, const Place &o, int r, int stride, int column) {
  return (char *)x + 2 * ((long long)o.b[r] * stride + column + o.wide);
}
__device__ __forceinline__ char *wide_x(const Args &g, const Place &o, int r, int column) {
  return (char *)g.x0 + 2 * ((long long)o.x[r] * g.stride_x + column + o.wide);
}
__device__ __forceinline__ char *eight(const Args &g, const Place &o, int r, int stride, int column) {
  return (char *)g.y8 + (long long)o.b[r] * stride + column + o.wide;
}
__device__ __forceinline__ char *pair(const void *x, const Place &o, int r, int stride, int column) {
  return (char *)x + 4 * ((long long)o.b[r] * stride + column + o.q * 2);
}

#define ALL(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)

#if EPI == SUMS
// y0: (parts, B, N) bf16
struct Epilogue {
  __device__ __forceinline__ void before(const Args &, const Place &) {}
  __device__ __forceinline__ void after(const Args &, const Place &) {}
  __device__ __forceinline__ void between(const Args &, const Place &) {}
  __device__ __forceinline__ void finish(const Args &g, const Place &o, float (&s)[ROWS][JF * 2]) {
    const int part = blockIdx.z / CS;
    ALL(r, ROWS) {
      char *out = wide((char *)g.y0 + 2ll * part * g.B * g.N, o, r, g.N, o.n);
      ALL(p, P) {
        const float *v = &s[r][p * 4];
        store2(out + p * 32, to_memory(bf16x2(v[0], v[1]), bf16x2(v[2], v[3]), o.odd), o.in[r] && o.n + p * 16 < g.N);
      }
    }
  }
};

#elif EPI == M_FORWARD || EPI == M_BACKWARD
// forward:  a = sums, m = mx sums.   x0 mx (stride_x); y0 a, y1 m, y8 m
// backward: da = mx sums, dmx = a sums.   x0 mx (stride_x), x1 a; y0 da, y1 dmx (stride_y)
struct Epilogue {
  uint2 x[ROWS][P], y[ROWS][P];
  __device__ __forceinline__ void before(const Args &g, const Place &o) {
    ALL(r, ROWS) {
      const char *mx = wide_x(g, o, r, o.n), *a = wide(g.x1, o, r, g.N, o.n);
      ALL(p, P) {
        const bool in = o.in[r] && o.n + p * 16 < g.N;
        x[r][p] = load2(mx + p * 32, in);
        if (EPI == M_BACKWARD) y[r][p] = load2(a + p * 32, in);
      }
    }
  }
  __device__ __forceinline__ void after(const Args &, const Place &) {}
  __device__ __forceinline__ void between(const Args &, const Place &) {}
  __device__ __forceinline__ void finish(const Args &g, const Place &o, float (&s)[ROWS][JF * 2]) {
    ALL(r, ROWS) {
      char *out_0 = wide(g.y0, o, r, g.N, o.n), *out_1 = wide(g.y1, o, r, EPI == M_FORWARD ? g.N : g.stride_y, o.n);
      ALL(p, P) {
        const bool in = o.in[r] && o.n + p * 16 < g.N;
        const float *v = &s[r][p * 4];
        const uint2 u = from_memory(x[r][p], o.odd);
        const uint2 by_x = to_memory(bf16x2(v[0] * bf16_low(u.x), v[1] * bf16_high(u.x)),
                                     bf16x2(v[2] * bf16_low(u.y), v[3] * bf16_high(u.y)), o.odd);
        if (EPI == M_FORWARD) {
          store2(out_1 + p * 32, by_x, in);
          if (EIGHT) store_e4m3(eight(g, o, r, g.N, o.n) + p * 16, by_x, g.scale, in);
          if (SAVE) store2(out_0 + p * 32, to_memory(bf16x2(v[0], v[1]), bf16x2(v[2], v[3]), o.odd), in);
        } else {
          const uint2 w = from_memory(y[r][p], o.odd);
          store2(out_0 + p * 32, by_x, in);
          store2(out_1 + p * 32, to_memory(bf16x2(v[0] * bf16_low(w.x), v[1] * bf16_high(w.x)),
                                           bf16x2(v[2] * bf16_low(w.y), v[3] * bf16_high(w.y)), o.odd), in);
        }
      }
    }
  }
};

#elif EPI == GATES
// z = zx + sums, then the cell. x0 zx (stride_x), x1 c_prev, x2 mask, x3 b_h (fp32); y0 z (fp16), y1 c, y2 h, y8 h
// Packed order: 64 columns are the 4 gates of 16 units, each gate a block of 16.
struct Epilogue {
  static constexpr int G = JF / 8;
  uint2 x[ROWS][G][4], old[ROWS][G][2], keep[ROWS][G][2];

  __device__ __forceinline__ void read_x(const Args &g, const Place &o, int r) {
    const char *zx = wide_x(g, o, r, o.n);
    ALL(k, G) ALL(i, 4) x[r][k][i] = load2(zx + k * 128 + i * 32, o.in[r] && o.n + k * 64 < g.N);
  }
  __device__ __forceinline__ void read_units(const void *from, uint2 (&to)[G][2], const Args &g, const Place &o, int r) {
    const char *units = pair(from, o, r, g.N / 4, o.n / 4);
    ALL(k, G) ALL(i, 2) to[k][i] = load2(units + k * 64 + i * 32, o.in[r] && o.n + k * 64 < g.N);
  }
  __device__ __forceinline__ void before(const Args &g, const Place &o) {
    if (AHEAD) {
      ALL(r, ROWS) {
        read_x(g, o, r);
        if (C_EARLY) read_units(g.x1, old[r], g, o, r);
        if (AHEAD > 1 && HAS_MASK) read_units(g.x2, keep[r], g, o, r);
      }
      return;
    }
    // Into L2 only, for there are no registers. A quad asks for the 128 bytes of a group and its 64 of c.
    ALL(r, ROWS) ALL(k, G) {
      const bool in = o.in[r] && o.n + k * 64 < g.N;
      prefetch((const char *)g.x0 + 2 * ((long long)o.x[r] * g.stride_x + o.n + k * 64 + o.q * 16), in);
      const char *c = (const char *)g.x1 + 4 * ((long long)o.b[r] * g.N / 4 + (o.n + k * 64) / 4 + (o.q & 1) * 8);
      prefetch(c, in && C_EARLY && o.q < 2);
    }
  }
  __device__ __forceinline__ void after(const Args &g, const Place &o) {
    if (AHEAD && !C_EARLY) ALL(r, ROWS) read_units(g.x1, old[r], g, o, r);
  }
  __device__ __forceinline__ void between(const Args &g, const Place &o) {
    if (HAS_MASK && AHEAD == 1) ALL(r, ROWS) read_units(g.x2, keep[r], g, o, r);
  }
  __device__ __forceinline__ void finish(const Args &g, const Place &o, float (&s)[ROWS][JF * 2]) {
    ALL(r, ROWS) {
    if (!AHEAD) {  // a row at a time: there are no registers for two
      read_x(g, o, r);
      read_units(g.x1, old[r], g, o, r);
      if (HAS_MASK) read_units(g.x2, keep[r], g, o, r);
    }
    char *out_z = wide(g.y0, o, r, g.N, o.n), *out_c = pair(g.y1, o, r, g.N / 4, o.n / 4), *out_h = wide(g.y2, o, r, g.N / 4, o.n / 4);
    ALL(k, G) {
      const bool in = o.in[r] && o.n + k * 64 < g.N;
      float z[4][4];  // gate; unit
      ALL(i, 4) {
        const uint2 u = from_memory(x[r][k][i], o.odd);
        const float *v = &s[r][k * 16 + i * 4];
        z[i][0] = v[0] + bf16_low(u.x);
        z[i][1] = v[1] + bf16_high(u.x);
        z[i][2] = v[2] + bf16_low(u.y);
        z[i][3] = v[3] + bf16_high(u.y);
        const u32 low = fp16x2(z[i][0], z[i][1]), high = fp16x2(z[i][2], z[i][3]);
        if (SAVE) store2(out_z + k * 128 + i * 32, to_memory(low, high, o.odd), in);
      }
      float c[4], h[4];
      ALL(e, 4) {
        const float h_hat = z[0][e], in_gate = z[1][e], out_gate = z[2][e], forget = z[3][e];
        const uint2 w = old[r][k][e / 2];
        const float before_ = __uint_as_float(e % 2 ? w.y : w.x);
        const float candidate = UNIT == INITIAL ? h_hat : quick_tanh(h_hat);
        // What is forgotten multiplies up over hundreds of steps.
        c[e] = sigmoid(forget) * before_ + quick_sigmoid(in_gate) * candidate;
        if (UNIT == STANDARD) {
          h[e] = quick_tanh(c[e]) * quick_sigmoid(out_gate);
        } else {
          float bias = 0.0f;
          if (HAS_B && o.n + k * 64 < g.N) bias = ((const float *)g.x3)[(o.n + k * 64) / 4 + o.q * 2 + (e / 2) * 8 + e % 2];
          h[e] = quick_tanh(quick_sigmoid(out_gate) * c[e] + bias);
        }
        if (HAS_MASK) {
          const uint2 m = keep[r][k][e / 2];
          h[e] *= __uint_as_float(e % 2 ? m.y : m.x);
        }
      }
      ALL(i, 2) store2(out_c + k * 64 + i * 32, as_words(c[i * 2], c[i * 2 + 1]), in);
      const uint2 units = to_memory(bf16x2(h[0], h[1]), bf16x2(h[2], h[3]), o.odd);
      store2(out_h + k * 32, units, in);
      if (EIGHT) store_e4m3(eight(g, o, r, g.N / 4, o.n / 4) + k * 16, units, g.scale, in);
    }
    }
  }
};

#elif EPI == CELL_BACKWARD
// dz and dc of the step before, whose dh is x4 + sums. x0 z (fp16), x1 c_prev, x2 c, x3 mask, x4 dh (bf16),
// x5 b_h (fp32); y0 dc (fp32, replaced), y1 dz (stride_y), y2 db_h (fp32, added to). N is H.
struct Epilogue {
  uint2 z[ROWS][P][4], old[ROWS][P][2], now[ROWS][P][2], keep[ROWS][P][2], d[ROWS][P], dc[ROWS][P][2];

  __device__ __forceinline__ void read_units(const void *from, uint2 (&to)[P][2], const Args &g, const Place &o, int r) {
    const char *x = pair(from, o, r, g.N, o.n);
    ALL(p, P) ALL(i, 2) to[p][i] = load2(x + p * 64 + i * 32, o.in[r] && o.n + p * 16 < g.N);
  }
  __device__ __forceinline__ void before(const Args &g, const Place &o) {
    ALL(r, ROWS) {
      const char *z_ = wide(g.x0, o, r, 4 * g.N, 4 * o.n), *d_ = wide(g.x4, o, r, g.N, o.n);
      ALL(p, P) {
        const bool in = o.in[r] && o.n + p * 16 < g.N;
        ALL(i, 4) z[r][p][i] = load2(z_ + p * 128 + i * 32, in);
        d[r][p] = load2(d_ + p * 32, in);
      }
      read_units(g.x1, old[r], g, o, r);
      read_units(g.x2, now[r], g, o, r);
      read_units(g.y0, dc[r], g, o, r);
      if (HAS_MASK) read_units(g.x3, keep[r], g, o, r);
    }
  }
  __device__ __forceinline__ void after(const Args &, const Place &) {}
  __device__ __forceinline__ void between(const Args &, const Place &) {}
  __device__ __forceinline__ void finish(const Args &g, const Place &o, float (&s)[ROWS][JF * 2]) {
    ALL(r, ROWS) {
    char *out_dz = wide(g.y1, o, r, g.stride_y, 4 * o.n), *out_dc = pair(g.y0, o, r, g.N, o.n), *out_db = pair(g.y2, o, r, g.N, o.n);
    ALL(p, P) {
      const int u = o.n + p * 16;
      const bool in = o.in[r] && u < g.N;
      uint2 gates[4];
      ALL(i, 4) gates[i] = from_memory(z[r][p][i], o.odd);
      const uint2 d_out = from_memory(d[r][p], o.odd);
      float dz[4][4], dc_new[4], db[4];
      ALL(e, 4) {
        const bool second = e % 2;
        float v[4];
        ALL(i, 4) {
          const u32 w = e / 2 ? gates[i].y : gates[i].x;
          v[i] = second ? fp16_high(w) : fp16_low(w);
        }
        const float c_prev = __uint_as_float(second ? old[r][p][e / 2].y : old[r][p][e / 2].x);
        const float c = __uint_as_float(second ? now[r][p][e / 2].y : now[r][p][e / 2].x);
        const u32 w = e / 2 ? d_out.y : d_out.x;
        float dh = (second ? bf16_high(w) : bf16_low(w)) + s[r][p * 4 + e];
        if (HAS_MASK) dh *= __uint_as_float(second ? keep[r][p][e / 2].y : keep[r][p][e / 2].x);
        const float i = sigmoid(v[1]), out = sigmoid(v[2]), f = sigmoid(v[3]);
        float y, S, D_o, D_hat, D_i;
        if (UNIT == STANDARD) {
          y = tanh_(c);
          S = 1.0f - y * y;
          D_o = y * out * (1.0f - out);
        } else {
          float bias = 0.0f;
          if (HAS_B && u < g.N) bias = ((const float *)g.x5)[u + (e / 2) * 8 + o.q * 2 + e % 2];
          y = tanh_(out * c + bias);
          S = 1.0f - y * y;
          D_o = S * c * out * (1.0f - out);
        }
        if (UNIT == INITIAL) {
          D_hat = i;
          D_i = v[0] * i * (1.0f - i);
        } else {
          const float a = tanh_(v[0]);
          D_hat = i * (1.0f - a * a);
          D_i = a * i * (1.0f - i);
        }
        const float d_c = __uint_as_float(second ? dc[r][p][e / 2].y : dc[r][p][e / 2].x) + dh * S * out;
        dz[0][e] = d_c * D_hat;
        dz[1][e] = d_c * D_i;
        dz[2][e] = dh * D_o;
        dz[3][e] = d_c * c_prev * f * (1.0f - f);
        dc_new[e] = d_c * f;
        db[e] = dh * S;
      }
      ALL(i, 4)
        store2(out_dz + p * 128 + i * 32,
               to_memory(bf16x2(dz[i][0], dz[i][1]), bf16x2(dz[i][2], dz[i][3]), o.odd), in);
      ALL(i, 2) store2(out_dc + p * 64 + i * 32, as_words(dc_new[i * 2], dc_new[i * 2 + 1]), in);
      if (HAS_B) ALL(i, 2) {
        const float2 v = as_floats(load2(out_db + p * 64 + i * 32, in));
        store2(out_db + p * 64 + i * 32, as_words(v.x + db[i * 2], v.y + db[i * 2 + 1]), in);
      }
    }
    }
  }
};
#endif
