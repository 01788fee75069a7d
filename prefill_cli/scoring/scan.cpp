// The inner loops of exact search on a CPU, built and called by kernels.py; topk.py holds the proof.
//
// A tile of TILE items is multiplied with a group of queries (scan: bfloat16, by PyTorch's brgemm, which knows the machine's
// matrix units; sift: a product that somebody else made). Each row of scores, 16 queries at a time, is held against the
// queries' cuts: most rows end there. What is above goes into the query's list with a lower and an upper bound of its
// score; a full list is cut back to what may still be in the answer, which raises the floor.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace c10 { struct BFloat16; }
namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}

using bf16 = uint16_t;
constexpr int64_t TILE = 64, LANES = 16, WIDE = 8, MOST_QUERIES = 512, MARKS = 64;
constexpr int64_t GONE = -1;  // count of a list that would not fit
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(4 * WIDE)));
typedef double Doubles __attribute__((vector_size(8 * WIDE)));

template <class V> static inline V load(const void* from) { V v; memcpy(&v, from, sizeof v); return v; }

struct Found { float lower, upper; int64_t item; };

struct Lists {             // sorted item rows of each user: [offsets[user], offsets[user + 1])
  const int64_t *offsets, *items;
  const uint64_t* marks;   // [n, MARKS]: a bit for each item's number modulo the bits, which most others have not
  bool holds(int64_t user, int64_t item) const {
    const uint64_t mark = marks[user * MARKS + (item / 64) % MARKS] >> item % 64 & 1;
    return mark && std::binary_search(items + offsets[user], items + offsets[user + 1], item);
  }
};

struct Scan {       // as kernels.py lays it out
  int64_t n, k, room;            // queries (a multiple of 16), list length, places of a list
  const float *of_norm, *of_residual, *constant;  // [n] the error of a score: of_norm * |x| + of_residual * |x - x'| + constant
  float* floors;                 // [n] no item with an upper bound below it is in the answer
  int64_t* counts;               // [n]
  Found* found;                  // [n, room]
  Lists exclude;                 // what a user must not get; offsets null: nothing
  Lists candidates;              // what a limited user may get
  const uint8_t* limited;        // [n]; null: nobody
};

static bool higher(const Found& a, const Found& b) { return a.lower > b.lower; }

static void cut_back(const Scan& s, int64_t q) {
  Found* list = s.found + q * s.room;
  std::nth_element(list, list + s.k - 1, list + s.counts[q], higher);
  s.floors[q] = std::max(s.floors[q], list[s.k - 1].lower);
  const float floor = s.floors[q];
  s.counts[q] = std::partition(list, list + s.counts[q], [floor](const Found& f) { return f.upper >= floor; }) - list;
  if (s.counts[q] > s.room - std::max<int64_t>(1, s.room / 4)) {  // too many near the k-th: another way will do this query
    s.counts[q] = GONE;
    s.floors[q] = INFINITY;
  }
}

static void keep(const Scan& s, int64_t q, float score, float error, int64_t item) {
  if (s.exclude.offsets && s.exclude.holds(q, item)) return;
  if (s.limited && s.limited[q] && !s.candidates.holds(q, item)) return;
  s.found[q * s.room + s.counts[q]++] = {score - error, score + error, item};
  if (s.counts[q] == s.room) cut_back(s, q);
}

static inline uint32_t not_below(Floats a, Floats b) {  // a bit for each lane where a >= b
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  const Ints above = a >= b;
  uint64_t words[LANES / 2], some = 0;
  memcpy(words, &above, sizeof words);
  for (uint64_t word : words) some |= word;
  uint32_t mask = 0;
  if (some) for (int64_t lane = 0; lane < LANES; lane++) mask |= uint32_t(above[lane] & 1) << lane;
  return mask;
#endif
}

// Scores [rows, n] of a tile against the cuts that follow from the norms of its items.
static void sift_tile(const Scan& s, const float* scores, int64_t rows, int64_t first, const float* bias, float norm,
                      float residual) {
  float errors[MOST_QUERIES], cuts[MOST_QUERIES];
  for (int64_t q = 0; q < s.n; q++) {
    errors[q] = s.of_norm[q] * norm + s.of_residual[q] * residual + s.constant[q];
    cuts[q] = s.floors[q] - errors[q];
  }
  for (int64_t r = 0; r < rows; r++, scores += s.n) {
    const float b = bias ? bias[r] : 0.0f;
    for (int64_t q = 0; q < s.n; q += LANES) {
      const Floats sum = load<Floats>(scores + q) + b;
      for (uint32_t mask = not_below(sum, load<Floats>(cuts + q)); mask; mask &= mask - 1) {
        const int64_t lane = __builtin_ctz(mask);
        keep(s, q + lane, sum[lane], errors[q + lane], first + r);
        cuts[q + lane] = s.floors[q + lane] - errors[q + lane];
      }
    }
  }
}

// items [rows, width] of bfloat16, of the catalogue's rows from `first` on; width is a multiple of 32 and the rest of a row
// is zero. queries: [width / 2][n] pairs. norms, residuals: [ceil(rows / TILE)] the largest of each tile. bias: [rows] or null.
extern "C" void scan(const Scan* s, const bf16* items, int64_t rows, int64_t width, int64_t first, const uint32_t* queries,
                     const float* bias, const float* norms, const float* residuals) {
  std::vector<float> scores(TILE * s->n);
  for (int64_t row = 0; row < rows; row += TILE) {
    const int64_t m = std::min(TILE, rows - row);
    at::native::cpublas::brgemm(m, s->n, width, width, s->n, s->n, false,
                                reinterpret_cast<const c10::BFloat16*>(items + row * width),
                                reinterpret_cast<const c10::BFloat16*>(queries), scores.data(), true);
    sift_tile(*s, scores.data(), m, first + row, bias ? bias + row : nullptr, norms[row / TILE], residuals[row / TILE]);
  }
  at::native::cpublas::brgemm_release(true);
}

// The same for scores [rows, n] that are there already.
extern "C" void sift(const Scan* s, const float* scores, int64_t rows, int64_t first, const float* bias, const float* norms,
                     const float* residuals) {
  for (int64_t row = 0; row < rows; row += TILE)
    sift_tile(*s, scores + row * s->n, std::min(TILE, rows - row), first + row, bias ? bias + row : nullptr, norms[row / TILE],
              residuals[row / TILE]);
}

// The marks [n, MARKS] of n users' lists.
extern "C" void mark(const int64_t* offsets, const int64_t* items, int64_t n, uint64_t* marks) {
  for (int64_t user = 0; user < n; user++, marks += MARKS) {
    std::fill_n(marks, MARKS, 0);
    for (int64_t i = offsets[user]; i < offsets[user + 1]; i++) marks[(items[i] / 64) % MARKS] |= uint64_t(1) << items[i] % 64;
  }
}

// What is left of `parts` scans over different items, [parts][n, room] and [parts][n] in counts, for queries begin … end - 1:
// item rows, end to end, to `items` and how many to `lengths` [end - begin]. A query that is gone in any part has none.
extern "C" void survivors(const Found* found, const int64_t* counts, int64_t parts, int64_t n, int64_t room, int64_t k,
                          int64_t begin, int64_t end, int64_t* lengths, int64_t* items) {
  std::vector<Found> all;
  for (int64_t q = begin; q < end; q++) {
    all.clear();
    bool gone = false;
    for (int64_t p = 0; p < parts; p++) {
      const int64_t count = counts[p * n + q];
      const Found* list = found + (p * n + q) * room;
      if (count == GONE) gone = true;
      else all.insert(all.end(), list, list + count);
    }
    if (gone) all.clear();
    float floor = -INFINITY;
    if (int64_t(all.size()) > k) {
      std::nth_element(all.begin(), all.begin() + k - 1, all.end(), higher);
      floor = all[k - 1].lower;
    }
    int64_t* first = items;
    for (const Found& f : all)
      if (f.upper >= floor) *items++ = f.item;
    lengths[q - begin] = items - first;
  }
}

// Scores of N pairs side by side: one sum alone would wait for each of its additions.
template <int N> static void pair_scores_of(const float* const (&q)[N], const float* const (&x)[N], int64_t width, double (&out)[N]) {
  Doubles sums[N] = {};
  int64_t d = 0;
  for (; d + WIDE <= width; d += WIDE)
    for (int i = 0; i < N; i++)
      sums[i] += __builtin_convertvector(load<Half>(q[i] + d), Doubles) * __builtin_convertvector(load<Half>(x[i] + d), Doubles);
  for (int i = 0; i < N; i++) {
    for (int64_t rest = d; rest < width; rest++) sums[i][rest - d] += double(q[i][rest]) * double(x[i][rest]);
    const Doubles s = sums[i];
    out[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
}

// Exact scores of m pairs: products of float32 numbers are exact in float64, summed in WIDE strands that depend on the width
// alone (rescore.py says the same in NumPy). vectors [count, width] at vector_rows, queries [., width] at users, bias at rows.
// Where pairs are many for so many vectors, those of neighbouring vectors are done together, so that each is read once.
extern "C" void pair_scores(const float* queries, const float* vectors, int64_t width, int64_t count, const int64_t* users,
                            const int64_t* vector_rows, const float* bias, const int64_t* rows, int64_t m, float* out) {
  constexpr int64_t NEIGHBOURS = 512, TOGETHER = 8, AHEAD = 8;
  std::vector<int64_t> order;
  if (m > count / 4) {
    std::vector<int64_t> places(count / NEIGHBOURS + 2);
    for (int64_t i = 0; i < m; i++) places[vector_rows[i] / NEIGHBOURS + 1]++;
    for (size_t bucket = 1; bucket < places.size(); bucket++) places[bucket] += places[bucket - 1];
    order.resize(m);
    for (int64_t i = 0; i < m; i++) order[places[vector_rows[i] / NEIGHBOURS]++] = i;
  }
  const auto pair = [&](int64_t at) { return order.empty() ? at : order[at]; };
  for (int64_t at = 0; at < m; at += TOGETHER) {
    const float *q[TOGETHER], *x[TOGETHER];
    double totals[TOGETHER];
    for (int64_t i = 0; i < TOGETHER; i++) {
      const int64_t p = pair(std::min(at + i, m - 1));
      q[i] = queries + users[p] * width;
      x[i] = vectors + vector_rows[p] * width;
      if (order.empty() && at + i + AHEAD < m) {
        const char* line = reinterpret_cast<const char*>(vectors + vector_rows[at + i + AHEAD] * width);
        for (int64_t byte = 0; byte < 4 * width; byte += 64) __builtin_prefetch(line + byte);
      }
    }
    pair_scores_of(q, x, width, totals);
    for (int64_t i = 0; i < TOGETHER && at + i < m; i++) {
      const int64_t p = pair(at + i);
      out[p] = float(totals[i] + (bias ? bias[rows[p]] : 0.0));
    }
  }
}

// The k best of each of n users' pairs [offsets[user], offsets[user + 1]), end to end: score descending, then row ascending.
extern "C" void best(const int64_t* offsets, const int64_t* rows, const float* scores, int64_t n, int64_t k, int64_t* out_rows,
                     float* out_scores) {
  std::vector<std::pair<float, int64_t>> pairs;
  for (int64_t user = 0; user < n; user++) {
    pairs.clear();
    for (int64_t i = offsets[user]; i < offsets[user + 1]; i++) pairs.emplace_back(-scores[i], rows[i]);
    const auto end = pairs.begin() + std::min<int64_t>(pairs.size(), k);
    if (end != pairs.end()) std::nth_element(pairs.begin(), end, pairs.end());
    std::sort(pairs.begin(), end);
    for (auto pair = pairs.begin(); pair != end; pair++) *out_rows++ = pair->second, *out_scores++ = -pair->first;
  }
}

// vectors [rows, width] → out [rows, padded] in bfloat16 (to nearest, ties to even; nothing in them is infinite or NaN), zeros
// after `width`; residuals [rows]: lengths of what is lost.
extern "C" void convert(const float* vectors, int64_t rows, int64_t width, int64_t padded, bf16* out, double* residuals) {
  typedef int32_t Bits __attribute__((vector_size(4 * WIDE)));
  typedef bf16 Rounded __attribute__((vector_size(2 * WIDE)));
  for (int64_t r = 0; r < rows; r++, vectors += width, out += padded) {
    Doubles squares = {};
    for (int64_t d = 0; d < width; d += WIDE) {
      Half x = {};
      const int64_t own = std::min(WIDE, width - d);
      memcpy(&x, vectors + d, own * sizeof(float));
      const Bits bits = (Bits)x, upper = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      const Doubles lost = __builtin_convertvector(x, Doubles) - __builtin_convertvector((Half)(upper << 16), Doubles);
      squares += lost * lost;
      const Rounded halves = __builtin_convertvector(upper, Rounded);
      memcpy(out + d, &halves, own * sizeof(bf16));
    }
    std::fill(out + width, out + padded, bf16(0));
    double total = 0;
    for (int64_t lane = 0; lane < WIDE; lane++) total += squares[lane];
    residuals[r] = std::sqrt(total);
  }
}
