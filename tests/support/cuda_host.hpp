// CUDA C++ texts as host code: the intrinsics that they use, blocks whose threads meet at barriers, and shared memory
// that finds races. A block's threads are fibers that run one after the other, in an order drawn from a seed; each runs
// to its next barrier. Two fibers that touch one element of shared memory between two barriers, one of them writing,
// are a race, and so is an element that is read before this block wrote it. An asynchronous copy arrives when it begins
// or when its thread waits for it, drawn from the seed; until then its elements hold nothing, and no thread may touch
// them. Waiting makes them visible to the thread itself; the others see them after a barrier, as if it wrote them then.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>
#define __device__
#define __global__
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define SHARED(type, name, count) static host::Shared<type, count> name(#name)
#define APART static
#define ON_HOST
struct Dim3 { unsigned int x; };
static Dim3 blockIdx = {0}, blockDim = {1}, threadIdx = {0}, gridDim = {1};
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline double __ll2double_rn(long long a) { return (double)a; }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __double2float_rn(double a) { return (float)a; }
template <class To, class From> static inline To as_bits(From a) { To b; std::memcpy(&b, &a, sizeof b); return b; }
static inline unsigned int __float_as_uint(float a) { return as_bits<unsigned int>(a); }
static inline float __uint_as_float(unsigned int a) { return as_bits<float>(a); }
static inline long long __double_as_longlong(double a) { return as_bits<long long>(a); }
static inline double __longlong_as_double(long long a) { return as_bits<double>(a); }

namespace host {
static char problem[256];
static unsigned long long epoch = 1, block_begin = 1;
static int current = 0;

static void report(const char* what, const char* name, unsigned long long index, int other) {
  if (!problem[0])
    std::snprintf(problem, sizeof problem, "%s: %s[%llu], thread %d and thread %d of block %u", what, name, index,
                  current, other, blockIdx.x);
}

// ---- shared memory ----

struct Seen { unsigned long long written = 0, read = 0; int writer = -1, reader = -1, copier = -1; };
template <class T> struct Place {
  T& value; Seen& seen; const char* name; unsigned long long index;
  operator T() const {
    if (seen.copier >= 0) report("read before its copy arrived", name, index, seen.copier);
    if (seen.written < block_begin) report("read before it was written", name, index, current);
    if (seen.written == epoch && seen.writer != current) report("race of a read with a write", name, index, seen.writer);
    seen.reader = seen.read == epoch && seen.reader != current ? -2 : current;
    seen.read = epoch;
    return value;
  }
  void operator=(const Place& other) { *this = (T)other; }
  void operator=(T x) {
    require_free();
    seen.writer = current;
    seen.written = epoch;
    value = x;
  }
  void require_free() const {
    if (seen.copier >= 0) report("written before its copy arrived", name, index, seen.copier);
    if (seen.written == epoch && seen.writer != current) report("race of two writes", name, index, seen.writer);
    if (seen.read == epoch && seen.reader != current) report("race of a write with a read", name, index, seen.reader);
  }
};
template <class T, unsigned long long N> struct Shared {
  T values[N]; Seen seen[N]; const char* name;
  explicit Shared(const char* name) : name(name) {}
  Place<T> operator[](unsigned long long i) {
    if (i >= N) { report("beyond the end", name, i, current); i = 0; }
    return {values[i], seen[i], name, i};
  }
};

// ---- asynchronous copies ----

static unsigned long long chance = 0;
static bool toss_coin() { return (chance = chance * 6364136223846793005ull + 1442695040888963407ull) >> 63; }
struct Copy { void* to; const void* from; Seen* seen; unsigned count; std::size_t bytes, all; char issued[16]; };
static std::vector<std::vector<Copy>> copies;

static void arrive(const Copy& copy) {
  std::memset(copy.to, 0, copy.all);
  std::memcpy(copy.to, copy.issued, copy.bytes);
}
template <int N, class T, unsigned long long M>
static void copy_async(Shared<T, M>& tile, unsigned long long at, const T* from, int count) {
  const std::size_t all = N * sizeof(T);
  if (at * sizeof(T) % all || (std::size_t)from % all) report("a copy that is not aligned", tile.name, at, current);
  if (all != 4 && all != 8 && all != 16) report("a copy of no possible size", tile.name, at, current);
  if (at + N > M) { report("beyond the end", tile.name, at, current); return; }
  for (int i = 0; i < N; ++i) {
    tile[at + i].require_free();
    tile.seen[at + i].copier = current;
  }
  Copy copy = {tile.values + at, from, tile.seen + at, N, count * sizeof(T), all, {}};
  std::memcpy(copy.issued, from, copy.bytes);
  std::memset(copy.to, 0xa5, all);
  if (toss_coin()) arrive(copy);
  copies[current].push_back(copy);
}
static void wait_for_copies() {
  for (const Copy& copy : copies[current]) {
    if (std::memcmp(copy.issued, copy.from, copy.bytes)) report("its source changed", "a copy", 0, current);
    arrive(copy);
    for (unsigned i = 0; i < copy.count; ++i) {
      copy.seen[i].copier = -1;
      copy.seen[i].writer = current;
      copy.seen[i].written = epoch;
    }
  }
  copies[current].clear();
}
template <int N, class T, unsigned long long M> static void take(Shared<T, M>& tile, unsigned long long at, T* to) {
  if (at % N) report("a piece that is not aligned", tile.name, at, current);
  for (int i = 0; i < N; ++i) to[i] = tile[at + i];
}

// ---- pieces of memory ----

static void require_piece(const void* place, std::size_t bytes) {
  if ((std::size_t)place % bytes || bytes > 16) report("a piece that is not aligned", "memory", 0, current);
}
template <int N, class T> static void read_piece(const T* from, T* to) {
  require_piece(from, N * sizeof(T));
  std::memcpy(to, from, N * sizeof(T));
}
template <int N, class T> static void write_piece(T* to, const T* from) {
  require_piece(to, N * sizeof(T));
  std::memcpy(to, from, N * sizeof(T));
}

// ---- fibers ----

static const std::size_t STACK = 1 << 16;
static ucontext_t scheduler;
struct Fiber { ucontext_t context; bool ended; std::vector<char> stack; };
static std::vector<Fiber> fibers;
static const std::function<void()>* body;

static void run_fiber() {
  (*body)();
  fibers[current].ended = true;
  swapcontext(&fibers[current].context, &scheduler);
}
static void run_block(unsigned threads, unsigned long long& random) {
  if (fibers.size() < threads) fibers.resize(threads), copies.resize(threads);
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = fibers[t];
    f.ended = false;
    f.stack.resize(STACK);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, run_fiber, 0);
  }
  std::vector<unsigned> order(threads);
  for (unsigned t = 0; t < threads; ++t) order[t] = t;
  block_begin = ++epoch;
  for (bool left = true; left; ++epoch) {
    for (unsigned t = threads; t > 1; --t) {
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[t - 1], order[(random >> 33) % t]);
    }
    unsigned ended = 0;
    for (unsigned t : order) {
      current = (int)t;
      threadIdx.x = t;
      swapcontext(&scheduler, &fibers[t].context);
      ended += fibers[t].ended;
    }
    left = ended == 0;
    if (left || ended == threads) continue;
    // A thread that has ended meets no barrier that the others wait at.
    report("a barrier that not every thread meets", "block", blockIdx.x, (int)ended);
    left = false;
  }
  for (unsigned t = 0; t < threads; ++t) {
    if (copies[t].empty()) continue;
    report("a copy that is not waited for", "thread", t, (int)t);
    current = (int)t;
    wait_for_copies();
  }
}

// ---- grids ----

template <class... P, std::size_t... I>
static void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) { kernel(*(P*)arguments[I]...); }
template <class... P>
static const char* launch(void (*kernel)(P...), unsigned blocks, unsigned threads, bool meets, unsigned long long seed,
                          unsigned begin, unsigned end, void** arguments) {
  problem[0] = 0;
  gridDim = {blocks};
  blockDim = {threads};
  unsigned long long random = seed;
  chance = seed;
  const std::function<void()> one = [&] { call(kernel, arguments, std::index_sequence_for<P...>()); };
  body = &one;
  const unsigned first = (unsigned)(seed % blocks);
  for (unsigned b = begin; b < end; ++b) {
    blockIdx.x = (b + first) % blocks;
    if (meets) { run_block(threads, random); continue; }
    for (unsigned t = 0; t < threads; ++t) {
      threadIdx.x = seed & 1 ? threads - 1 - t : t;
      one();
    }
  }
  return problem;
}
}  // namespace host
using host::copy_async;
using host::read_piece;
using host::take;
using host::wait_for_copies;
using host::write_piece;
static void __syncthreads() { swapcontext(&host::fibers[host::current].context, &host::scheduler); }
