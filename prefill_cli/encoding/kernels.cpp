// What lies between the products of a Llama-like layer, in bfloat16 on a CPU: norms, rotary positions, the gate, and
// attention over a packed row. Built and called by kernels.py; the Python of decoders.py and attention.py says the same.
//
// Attention: scaled_dot_product_attention packs keys again for every call and spends most of its time outside the
// products. Here a sequence's keys and values are packed once per layer, the heads that share them are one product, and a
// tile's softmax runs over rows that are in the cache. Products come from PyTorch (brgemm), which knows the machine's
// units. A query tile has TILE positions that are counted from the prompt's beginning and sees whole blocks of BLOCK keys,
// so that the shape and order of all sums follow from a position alone: its bits are the same in any company.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace c10 { struct BFloat16; }
namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}

using bf16 = uint16_t;
constexpr int64_t TILE = 32, BLOCK = 64, MOST_HEADS = 8;
constexpr int32_t LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef bf16 Halves __attribute__((vector_size(2 * LANES)));
constexpr float UNSEEN = -1e30f;  // a score that no key has: below it, a weight is 0 and nothing is NaN

template <class V> static inline V load(const void* from) { V v; memcpy(&v, from, sizeof v); return v; }

static void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                     const bf16* a, const uint32_t* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const c10::BFloat16*>(a),
                              reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

static inline Halves rounded(Floats x) {  // to nearest, ties to even
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#endif
  const Ints bits = (Ints)x;
  return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
}

static inline Floats widened(const bf16* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Ints) << 16);
}

static inline void store(bf16* to, Floats x) {
  const Halves h = rounded(x);
  memcpy(to, &h, sizeof h);
}

// e^x for x <= 0, within 2 units of float32: 2^n by the exponent's bits, the rest by Cephes' polynomial (expf).
static inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest whole number is in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

template <int W> static inline Floats swapped(Floats x) {  // each lane with the one W away
  Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(x, lanes ^ W);
}

static inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

static inline float highest(Floats x) {
  x = greater(x, swapped<8>(x));
  x = greater(x, swapped<4>(x));
  x = greater(x, swapped<2>(x));
  return greater(x, swapped<1>(x))[0];
}

static inline float total(Floats x) {
  x += swapped<8>(x);
  x += swapped<4>(x);
  x += swapped<2>(x);
  return (x + swapped<1>(x))[0];
}

// Scores of a row → weights, of which keys from..to are seen and the others 0; returns 1 / their sum. A seen score that
// is NaN or +infinite makes the sum NaN, and so the row.
static float softmax(float* scores, bf16* weights, int32_t n, int32_t from, int32_t to, float scale) {
  const int32_t begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
  std::fill(scores + begin, scores + from, UNSEEN);
  std::fill(scores + to, scores + end, UNSEEN);
  Floats most = load<Floats>(scores + begin);
  for (int32_t j = begin + LANES; j < end; j += LANES) {
    most = greater(load<Floats>(scores + j), most);
  }
  const float top = highest(most);
  Floats sum = {};
  for (int32_t j = begin; j < end; j += LANES) {
    const Floats e = exponential((load<Floats>(scores + j) - top) * scale);
    sum += e;
    store(weights + j, e);
  }
  std::fill(weights, weights + from, bf16(0));
  std::fill(weights + to, weights + n, bf16(0));
  return 1.0f / total(sum);
}

// x [size] times weight [size] over its root mean square.
static inline void rms_norm(const bf16* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  Floats squares = {};
  for (int64_t d = 0; d < size; d += LANES) squares += widened(x + d) * widened(x + d);
  const float scale = 1.0f / std::sqrt(total(squares) / size + eps);
  for (int64_t d = 0; d < size; d += LANES) store(out + d, widened(x + d) * scale * widened(weight + d));
}

// hidden [rows, size] += delta [rows, size] (where there is one); out [rows, size] = its norm.
extern "C" void add_norm(bf16* hidden, const bf16* delta, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps) {
  for (int64_t r = 0; r < rows; r++, hidden += size, out += size) {
    if (delta)
      for (int64_t d = 0; d < size; d += LANES) store(hidden + d, widened(hidden + d) + widened(delta + r * size + d));
    rms_norm(hidden, weight, out, size, eps);
  }
}

// out [rows, size] = silu(gate) * up for joined [rows, gate then up].
extern "C" void gate(const bf16* joined, bf16* out, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; r++, joined += 2 * size, out += size)
    for (int64_t d = 0; d < size; d += LANES) {
      const Floats x = widened(joined + d), e = exponential(x < 0.0f ? x : -x);  // e^-|x| never overflows
      store(out + d, x * (x < 0.0f ? e : Floats{} + 1.0f) / (e + 1.0f) * widened(joined + size + d));
    }
}

// joined [rows, query heads, key heads, value heads], each of `size` → query, key and value apart, the first two with
// rotary positions: cos, sin [rows, size / 2]. Before those, heads are normed where there are norms (Qwen 3).
extern "C" void rotate(const bf16* joined, const float* cos, const float* sin, const bf16* query_norm, const bf16* key_norm,
                       bf16* query, bf16* key, bf16* value, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size,
                       float eps) {
  const int64_t half = size / 2;
  std::vector<bf16> normed(size);
  for (int64_t r = 0; r < rows; r++, cos += half, sin += half) {
    for (int64_t h = 0; h < heads + kv_heads; h++, joined += size) {
      const bool is_query = h < heads;
      const bf16 *weight = is_query ? query_norm : key_norm, *x = joined;
      bf16* to = is_query ? query + (r * heads + h) * size : key + (r * kv_heads + h - heads) * size;
      if (weight) rms_norm(joined, weight, normed.data(), size, eps), x = normed.data();
      for (int64_t d = 0; d < half; d += LANES) {
        const Floats a = widened(x + d), b = widened(x + half + d), c = load<Floats>(cos + d), s = load<Floats>(sin + d);
        store(to + d, a * c - b * s);
        store(to + half + d, b * c + a * s);
      }
    }
    std::copy_n(joined, kv_heads * size, value + r * kv_heads * size);
    joined += kv_heads * size;
  }
}

struct Sequence {  // as attention.py lays it out
  int64_t row, length, start;
  const bf16 *context_keys, *context_values;  // positions 0..start, [start, KV heads, size]
};

// Rows of queries [R, heads, size], keys and values [R, KV heads, size] (strides: elements from row to row) to out
// [R, heads, size]. window: positions that a query sees, itself included.
extern "C" void attend(const bf16* queries, const bf16* keys, const bf16* values, bf16* out,
                       int64_t query_stride, int64_t key_stride, int64_t value_stride,
                       const Sequence* sequences, int64_t count, int64_t heads, int64_t kv_heads, int64_t size,
                       float scale, int64_t window, int64_t last_tile_only) {
  const int64_t group = heads / kv_heads, folded = std::min(group, MOST_HEADS), m = folded * TILE;
  std::vector<uint32_t> packed_keys, packed_values;  // pairs of bfloat16, as the products want their right side
  std::vector<bf16> tile(m * size), weights;
  std::vector<float> scores, sums(m * size);
  const std::vector<bf16> zeros(size);
  for (const Sequence* s = sequences; s < sequences + count; s++) {
    const int64_t end = s->start + s->length, blocks = (end + BLOCK - 1) / BLOCK;
    packed_keys.resize(blocks * BLOCK * size / 2);
    packed_values.resize(blocks * BLOCK * size / 2);
    weights.resize(m * blocks * BLOCK);
    scores.resize(m * blocks * BLOCK);
    for (int64_t h = 0; h < kv_heads; h++) {
      const auto at = [&](const bf16* context, const bf16* own, int64_t stride, int64_t position) {
        return position >= end        ? zeros.data()
               : position < s->start  ? context + (position * kv_heads + h) * size
                                      : own + (s->row + position - s->start) * stride + h * size;
      };
      for (int64_t position = 0; position < blocks * BLOCK; position++) {  // keys: [block][size / 2][BLOCK] pairs
        const bf16* key = at(s->context_keys, keys, key_stride, position);
        uint32_t* to = packed_keys.data() + position / BLOCK * BLOCK * size / 2 + position % BLOCK;
        for (int64_t d = 0; d < size / 2; d++) to[d * BLOCK] = key[2 * d] | uint32_t(key[2 * d + 1]) << 16;
      }
      for (int64_t position = 0; position < blocks * BLOCK; position += 2) {  // values: [position / 2][size] pairs
        const bf16* one = at(s->context_values, values, value_stride, position);
        const bf16* two = at(s->context_values, values, value_stride, position + 1);
        uint32_t* to = packed_values.data() + position / 2 * size;
        for (int64_t d = 0; d < size; d++) to[d] = one[d] | uint32_t(two[d]) << 16;
      }
      const int64_t last = (end - 1) / TILE;
      for (int64_t t = last_tile_only ? last : s->start / TILE; t <= last; t++)
        for (int64_t g = h * group; g < (h + 1) * group; g += folded) {
          const int64_t low = t * TILE, used = std::min(folded, (h + 1) * group - g);
          const int64_t first = std::max<int64_t>(0, low - window + 1) / BLOCK, n = ((low + TILE - 1) / BLOCK + 1 - first) * BLOCK;
          for (int64_t r = 0; r < m; r++) {
            const int64_t position = low + r % TILE;
            const bool own = position >= s->start && position < end && r / TILE < used;
            const bf16* from = own ? queries + (s->row + position - s->start) * query_stride + (g + r / TILE) * size : zeros.data();
            std::copy_n(from, size, tile.data() + r * size);
          }
          for (int64_t b = 0; b < n / BLOCK; b++)
            multiply(m, BLOCK, size, size, BLOCK, n, false, tile.data(),
                     packed_keys.data() + (first + b) * BLOCK * size / 2, scores.data() + b * BLOCK);
          float inverse[MOST_HEADS * TILE];
          for (int64_t r = 0; r < m; r++) {
            const int64_t position = low + r % TILE;
            const int32_t from = std::max<int64_t>(0, position - window + 1) - first * BLOCK, to = position + 1 - first * BLOCK;
            inverse[r] = softmax(scores.data() + r * n, weights.data() + r * n, n, from, to, scale);
          }
          for (int64_t b = 0; b < n / BLOCK; b++)
            multiply(m, size, BLOCK, n, size, size, b > 0, weights.data() + b * BLOCK,
                     packed_values.data() + (first + b) * BLOCK / 2 * size, sums.data());
          for (int64_t r = 0; r < used * TILE; r++) {
            const int64_t position = low + r % TILE;
            if (position < s->start || position >= end) continue;
            bf16* to = out + ((s->row + position - s->start) * heads + g + r / TILE) * size;
            for (int64_t d = 0; d < size; d += LANES) store(to + d, load<Floats>(sums.data() + r * size + d) * inverse[r]);
          }
        }
    }
  }
  at::native::cpublas::brgemm_release(true);
}
