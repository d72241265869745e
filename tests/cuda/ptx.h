/* ptx.h - runs PTX, the text that nvcc makes of kernels, on the CPU, and counts what it does.

   A warp's 32 lanes are executed as one; lanes that part at a branch meet again because those behind go first. What a
   GPU would leave to luck is an error: an address outside the device's allocations or the block's shared memory, or not
   aligned; shared memory read before it is written, or used by two warps, of which one writes, with no barrier between;
   shared memory used before what cp.async brings there is waited for, which is when it arrives; lanes that are missing
   at a barrier or a shuffle. Each instruction counts how often warps execute it, the 32-byte
   sectors of its requests to global memory and the wavefronts of those to shared memory, and the least they could be.

   Nothing here has a clock, caches, or what ptxas does afterwards; functions that PTX calls approximate are the host's.
   Matrix instructions are those of TF32 and BF16 that add to float32; each product's sum is rounded. Textures, atomics
   and votes are not known: reading them ends the program with a sentence.

   Chapters: >>types >>arithmetic >>table >>memory >>reading >>running */
#ifndef PTX_H
#define PTX_H
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace ptx {
/* ---------------------------------------------------------------------------------------------------------------------
   >>types
   ------------------------------------------------------------------------------------------------------------------ */
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;
enum space_of { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };
enum kind_of { STRAIGHT, BRANCH, RETURN, BARRIER, WARP_BARRIER, SHUFFLE };
/* of instructions: FREE are those that ptxas leaves no trace of */
enum work_of { FMA, TENSOR, FLOAT, DOUBLE, SPECIAL, INT, LONG, GLOBALS, SHAREDS, LOCALS, JUMP, MEET, FREE, WORKS };
inline constexpr const char *work_name[WORKS] = {"fma",    "mma",    "float", "double", "special", "int", "long",
                                                 "global", "shared", "local", "jump",   "meet",    "free"};
/* generic addresses of local and shared memory have these bits */
inline constexpr u64 IN_LOCAL = 2ull << 60, IN_SHARED = 3ull << 60, WINDOW = 15ull << 60;
inline constexpr int LANES = 32;

struct instruction;
struct sending { instruction *by; u32 lanes; u64 at[LANES]; u32 value[4][LANES]; }; /* under way to shared memory */
struct operand { u32 at = 0; uint8_t constant = 0, bits = 0; }; /* a byte offset; bits: 1, 32 or 64, or 0 for none */
struct warp {
  char *bank[2];                           /* registers, constants */
  char *local;
  u32 exist, done, waiting, blocked, carry, vote; /* bits per lane */
  u32 pc[LANES];
  int number;
  std::vector<sending> sent;
  char *of(const operand &o) const { return bank[o.constant] + o.at; }
};
typedef void (*runner)(warp &, instruction &, u32 lanes);
struct instruction {
  runner run = nullptr;
  kind_of kind = STRAIGHT;
  space_of space = GENERIC;
  work_of work = FREE;
  double weight = 1;                       /* machine instructions that it stands for, about */
  operand guard, to[4], from[10];
  bool negated = false, store = false, is_float = false, is_signed = false;
  int target = -1, line = 0, outer = 0;    /* outer: the line that the innermost function was inlined into */
  unsigned width = 0, count = 1;           /* of memory: bytes of an element, elements */
  s64 offset = 0;
  char mode = 0;
  std::string op, label;
  u64 executed = 0, units = 0, ideal = 0;  /* units: sectors or wavefronts */
  bool reached = false;                    /* ever executed */
};
struct parameter { std::string name; size_t size, offset; };
struct kernel {
  std::string name, body;
  std::vector<parameter> parameters;
  size_t parameter_bytes = 0, shared = 0, local = 0, registers = 0;
  unsigned most_threads = 0;
  bool read = false, entry = false;        /* entry: a kernel, not a function that kernels call */
  std::vector<instruction> code;
  std::vector<char> constants;
  u64 launches = 0, touched = 0;           /* touched: sectors, each once a launch for loads and once for stores */
};
/* epochs; reader -2: several warps; sent: something is under way to it */
struct shadow { u32 written = 0, seen = 0; int writer = -1, reader = -1; bool sent = false; };
struct stored { u64 at, old; const instruction *by; };

struct machine {
  std::map<std::string, kernel> kernels;
  std::map<std::string, std::vector<char>> globals;
  std::function<bool(u64 at, size_t bytes, u64 &begin, u64 &end)> find; /* the allocation that holds these bytes */
  std::function<void(const char *sentence)> tell;
  u64 begin = 1, end = 0;                  /* the allocation that was found last */
  std::vector<char> shared, parameters;
  std::vector<shadow> shadows;
  u32 epoch = 0, block_epoch = 0;
  std::vector<stored> *log = nullptr;      /* where global stores leave what was there */
  kernel *now = nullptr;
  const instruction *at = nullptr;
  unsigned block[3] = {}, threads = 0;
  bool failed = false;
  u32 number = 0;                          /* of the launch */
  u32 *touched[2] = {};                    /* loads, stores: the launch that last did, of each sector modulo SECTORS */
};
inline constexpr u64 SECTORS = (u64)1 << 27;
inline machine m;

inline void error(const warp *w, int lane, const char *format, ...) {
  char s[400];
  int n = snprintf(s, sizeof s, "ptx: %.120s block (%u,%u,%u) warp %d lane %d, luna_cuda.cuh:%d in %d, %s: ",
                   m.now ? m.now->name.c_str() : "", m.block[0], m.block[1], m.block[2], w ? w->number : -1, lane,
                   m.at ? m.at->line : 0, m.at ? m.at->outer : 0, m.at ? m.at->op.c_str() : "the launch");
  va_list list;
  va_start(list, format);
  vsnprintf(s + n, sizeof s - (size_t)n, format, list);
  va_end(list);
  if (!m.failed) m.tell(s);
  m.failed = true;
}
inline int first(u32 lanes) { return __builtin_ctz(lanes); }

/* ---------------------------------------------------------------------------------------------------------------------
   >>arithmetic: instructions as functions of one lane; `each` makes of one what runs a warp
   ------------------------------------------------------------------------------------------------------------------ */
template <class T> inline T lane_of(const char *p, int lane) {
  if constexpr (std::is_same<T, bool>::value) return *(const u32 *)p >> lane & 1;
  else return ((const T *)p)[lane];
}
inline void set_bits(char *p, u32 bits, u32 lanes) { *(u32 *)p = (*(u32 *)p & ~lanes) | (bits & lanes); }
template <class T> constexpr int bits_of() { return std::is_same<T, bool>::value ? 1 : sizeof(T) == 8 ? 64 : 32; }

template <auto f> struct each;
template <class D, class... A, D (*f)(A...)> struct each<f> {
  template <size_t... n> static void go(warp &w, instruction &i, u32 lanes, std::index_sequence<n...>) {
    char *const to = w.of(i.to[0]);
    const char *const from[] = {w.of(i.from[n])...};
    if constexpr (std::is_same<D, bool>::value) {
      u32 bits = 0;
      for (int l = 0; l < LANES; l++) bits |= (u32)f(lane_of<A>(from[n], l)...) << l;
      set_bits(to, bits, lanes);
    } else if (lanes == ~0u) {
#pragma GCC ivdep
      for (int l = 0; l < LANES; l++) ((D *)to)[l] = f(lane_of<A>(from[n], l)...);
    } else {
      for (u32 left = lanes; left; left &= left - 1) ((D *)to)[first(left)] = f(lane_of<A>(from[n], first(left))...);
    }
  }
  static void run(warp &w, instruction &i, u32 lanes) { go(w, i, lanes, std::index_sequence_for<A...>()); }
};
struct entry { runner run; work_of work; double weight; int to; std::vector<int> from; };
template <auto f> struct shape;
template <class D, class... A, D (*f)(A...)> struct shape<f> {
  static entry of(work_of work, double weight) { return {each<f>::run, work, weight, bits_of<D>(), {bits_of<A>()...}}; }
};
template <auto f> entry op(work_of work, double weight = 1) { return shape<f>::of(work, weight); }

template <class T> T add(T a, T b) { return a + b; }
template <class T> T sub(T a, T b) { return a - b; }
template <class T> T mul(T a, T b) { return a * b; }
template <class T> T mad(T a, T b, T c) { return a * b + c; }
template <class T> T lesser(T a, T b) { return a < b ? a : b; }
template <class T> T greater(T a, T b) { return a > b ? a : b; }
template <class T> T neg(T a) { return -a; }
template <class T> T wrapped_neg(T a) { return 0 - a; }
template <class T> bool overflows(T a, T b) { return std::is_signed<T>::value && b == (T)-1 && a == (T)((u64)1 << 63); }
template <class T> T quotient(T a, T b) { return b == 0 ? (T)-1 : overflows(a, b) ? a : a / b; }
template <class T> T rest(T a, T b) { return b == 0 ? a : overflows(a, b) ? 0 : a % b; }
inline s32 quotient32(s32 a, s32 b) { return (s32)quotient<s64>(a, b); }
inline s32 rest32(s32 a, s32 b) { return (s32)rest<s64>(a, b); }
template <class T> T both(T a, T b) { return a & b; }
template <class T> T either(T a, T b) { return a | b; }
template <class T> T differ(T a, T b) { return a ^ b; }
template <class T> T inverse(T a) { return ~a; }
inline bool negated(bool a) { return !a; }
template <class T> T same(T a) { return a; }
template <class T> T left(T a, u32 n) { return n >= sizeof(T) * 8 ? 0 : a << n; }
template <class T> T right(T a, u32 n) {
  const u32 most = sizeof(T) * 8 - 1;
  return n <= most ? a >> n : std::is_signed<T>::value ? a >> most : 0;
}
inline u32 right16(u32 a, u32 n) { return n > 15 ? 0 : (a & 0xffff) >> n; }
template <class T> T choose(T a, T b, bool p) { return p ? a : b; }
inline s32 absolute32(s32 a) { return a < 0 ? (s32)(0u - (u32)a) : a; }
inline s64 absolute64(s64 a) { return a < 0 ? (s64)(0ull - (u64)a) : a; }
inline u32 high_u32(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline s32 high_s32(s32 a, s32 b) { return (s32)((s64)a * b >> 32); }
inline u64 high_u64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
inline u64 wide_u32(u32 a, u32 b) { return (u64)a * b; }
inline s64 wide_s32(s32 a, s32 b) { return (s64)a * b; }
inline u64 mad_wide_u32(u32 a, u32 b, u64 c) { return (u64)a * b + c; }
inline u64 mad_wide_s32(s32 a, s32 b, u64 c) { return (u64)((s64)a * b) + c; }
inline u32 zeros32(u32 a) { return a ? (u32)__builtin_clz(a) : 32; }
inline u32 zeros64(u64 a) { return a ? (u32)__builtin_clzll(a) : 64; }
template <class T> T insert(T a, T b, u32 at, u32 bits) {
  const T mask = (bits >= sizeof(T) * 8 ? ~(T)0 : ((T)1 << bits) - 1);
  return at >= sizeof(T) * 8 ? b : (b & ~(mask << at)) | (a & mask) << at;
}

template <class T> bool eq(T a, T b) { return a == b; }
template <class T> bool ne(T a, T b) { return a < b || a > b; }
template <class T> bool lt(T a, T b) { return a < b; }
template <class T> bool le(T a, T b) { return a <= b; }
template <class T> bool gt(T a, T b) { return a > b; }
template <class T> bool ge(T a, T b) { return a >= b; }
template <class T> bool equ(T a, T b) { return !(a < b || a > b); }
template <class T> bool neu(T a, T b) { return !(a == b); }
template <class T> bool ltu(T a, T b) { return !(a >= b); }
template <class T> bool leu(T a, T b) { return !(a > b); }
template <class T> bool gtu(T a, T b) { return !(a <= b); }
template <class T> bool geu(T a, T b) { return !(a < b); }
template <class T> bool num(T a, T b) { return a == a && b == b; }
template <class T> bool nan(T a, T b) { return a != a || b != b; }
template <bool (*f)(s32, s32)> bool of16(u32 a, u32 b) { return f((int16_t)a, (int16_t)b); }

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused64(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T> T divided(T a, T b) { return a / b; }
template <class T> T inverse_of(T a) { return 1 / a; }
inline float root32(float a) { return sqrtf(a); }
inline double root64(double a) { return sqrt(a); }
inline float flushed(float a) { return fabsf(a) < 1.17549435e-38f ? copysignf(0, a) : a; }
inline float exp2_flushed(float a) { return flushed(exp2f(flushed(a))); }
inline float exp2_of(float a) { return exp2f(a); }
inline float log2_of(float a) { return log2f(a); }
inline double inverse_high(double a) {      /* its high word, as the double that an approximation is */
  const double x = 1 / a;
  u64 bits;
  memcpy(&bits, &x, sizeof bits);
  bits &= ~0xffffffffull;
  double high;
  memcpy(&high, &bits, sizeof high);
  return high;
}
inline float inverse_flushed(float a) { return flushed(1 / flushed(a)); }
inline float inverse_root(float a) { return (float)(1 / sqrt((double)a)); }
/* as floats whose low bits are 0: halves away from zero; to even */
inline u32 bits_of_float(float a) {
  u32 bits;
  memcpy(&bits, &a, sizeof bits);
  return bits;
}
inline float float_of_bits(u32 bits) {
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}
inline u32 tf32(float a) { return fabsf(a) < INFINITY ? (bits_of_float(a) + 0x1000) & ~0x1fffu : bits_of_float(a); }
inline u32 bf16(float a) {
  const u32 bits = bits_of_float(a);
  return a != a ? 0x7fff : fabsf(a) < INFINITY ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16;
}
inline u32 bf16_pair(float high, float low) { return bf16(high) << 16 | bf16(low); }
inline float absolute_f32(float a) { return fabsf(a); }
inline double absolute_f64(double a) { return fabs(a); }
inline float signed_as(float sign, float a) { return copysignf(a, sign); }
inline float saturated(float a) { return a > 0 ? a < 1 ? a : 1.0f : 0.0f; }
/* a NaN gives way, and -0 lies below 0 */
inline float larger(float a, float b) { return a != a ? b : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b; }
inline float smaller(float a, float b) { return a != a ? b : b != b ? a : a < b || (a == b && signbit(a)) ? a : b; }
/* a + b, the sum exact, rounded down or to zero */
inline float rounded(double a, double b, bool to_zero) {
  const double sum = a + b, part = sum - a, error = (a - (sum - part)) + (b - part);
  const float near = (float)sum;
  if (!(fabsf(near) < INFINITY)) return near;
  const double off = (double)near - sum;
  const bool above = off > 0 || (off == 0 && error < 0), below = off < 0 || (off == 0 && error > 0);
  if (to_zero && sum < 0) return below ? nextafterf(near, 0) : near;
  return above ? nextafterf(near, to_zero ? 0 : -INFINITY) : near;
}
inline float fused_down(float a, float b, float c) { return rounded((double)a * b, c, false); }
inline float add_to_zero(float a, float b) { return rounded(a, b, true); }
template <class D, class A> D cast(A a) { return (D)a; }
template <class D, class T> D extended(u32 a) { return (D)(T)a; }
template <double (*f)(double)> s32 whole(double a) {
  const double r = f(a);
  return r != r ? 0 : r >= 2147483647.0 ? 2147483647 : r <= -2147483648.0 ? (s32)0x80000000u : (s32)r;
}
template <float (*f)(float)> float whole_float(float a) { return f(a); }
inline double whole_double(double a) { return trunc(a); }
template <double (*f)(double)> s32 whole_f32(float a) { return whole<f>(a); }

/* the carry goes from lane's bit to lane's bit of w.carry: 'a'dd, 's'ubtract, 'l'ow or 'h'igh half of a product */
template <char what, bool takes, bool leaves> void with_carry(warp &w, instruction &i, u32 lanes) {
  const bool product = what == 'l' || what == 'h';
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest);
    const u64 a = lane_of<u32>(w.of(i.from[0]), l), b = lane_of<u32>(w.of(i.from[1]), l);
    const u64 c = product ? lane_of<u32>(w.of(i.from[2]), l) : 0, in = takes ? w.carry >> l & 1 : 0;
    const u64 x = what == 'a' ? a + b + in : what == 's' ? a - b - in : (what == 'l' ? (u32)(a * b) : a * b >> 32) +
        c + in;
    ((u32 *)w.of(i.to[0]))[l] = (u32)x;
    if (leaves) w.carry = (w.carry & ~(1u << l)) | (u32)(x >> 32 & 1) << l;
  }
}
template <char what, bool takes, bool leaves> entry carries() {
  const bool product = what == 'l' || what == 'h';
  return {with_carry<what, takes, leaves>, INT, 1, 32, std::vector<int>(product ? 3 : 2, 32)};
}
inline void pack(warp &w, instruction &i, u32 lanes) {
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest);
    ((u64 *)w.of(i.to[0]))[l] = lane_of<u32>(w.of(i.from[0]), l) | (u64)lane_of<u32>(w.of(i.from[1]), l) << 32;
  }
}
inline void unpack(warp &w, instruction &i, u32 lanes) {
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest);
    const u64 x = lane_of<u64>(w.of(i.from[0]), l);
    ((u32 *)w.of(i.to[0]))[l] = (u32)x;
    ((u32 *)w.of(i.to[1]))[l] = (u32)(x >> 32);
  }
}
/* C [16, 8] += A [16, K] B [K, 8], K = 8 of TF32 or 16 of BF16, two in a register. Lane 4 g + t has of C rows g and
   g + 8, columns 2 t and 2 t + 1; of A such rows, of B column g, of both t's and t + 4's share of the steps. */
template <bool halves> void multiply_matrices(warp &w, instruction &i, u32 lanes) {
  constexpr int each = halves ? 2 : 1, steps = 8 * each;
  float a[16][steps], b[steps][8];
  if (lanes != ~0u) return error(&w, first(lanes), "is in a matrix product that lanes %08x pass by", ~lanes);
  for (int l = 0; l < LANES; l++)
    for (int r = 0; r < 6; r++)
      for (int e = 0; e < each; e++) {
        const u32 x = lane_of<u32>(w.of(i.from[r]), l);
        const int k = (r < 4 ? r / 2 : r - 4) * 4 * each + l % 4 * each + e;
        const float value = float_of_bits(halves ? x >> 16 * e << 16 : x & ~0x1fffu);
        if (r < 4) a[l / 4 + r % 2 * 8][k] = value;
        else b[k][l / 4] = value;
      }
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < LANES; l++) {
      float sum = lane_of<float>(w.of(i.from[6 + r]), l);
      for (int k = 0; k < steps; k++) sum += a[l / 4 + r / 2 * 8][k] * b[k][l % 4 * 2 + r % 2];
      ((float *)w.of(i.to[r]))[l] = sum;
    }
}
inline u64 local_address(u64 a) { return a | IN_LOCAL; }
inline u64 shared_address(u64 a) { return a | IN_SHARED; }
inline u64 plain_address(u64 a) { return a & ~WINDOW; }

/* ---------------------------------------------------------------------------------------------------------------------
   >>table: by name; weights are of the machine code that ptxas makes, about
   ------------------------------------------------------------------------------------------------------------------ */
typedef std::unordered_map<std::string, entry> entries;
#define PTX_WRAPS(name, f) \
  {name ".u32", op<f<u32>>(INT)}, {name ".s32", op<f<u32>>(INT)}, {name ".u64", op<f<u64>>(LONG, 2)}, \
  {name ".s64", op<f<u64>>(LONG, 2)}
#define PTX_ORDERED(name, f) \
  {name ".u32", op<f<u32>>(INT)}, {name ".s32", op<f<s32>>(INT)}, {name ".u64", op<f<u64>>(LONG, 2)}, \
  {name ".s64", op<f<s64>>(LONG, 2)}
#define PTX_BITS(name, f) \
  {name ".b16", op<f<u32>>(INT)}, {name ".b32", op<f<u32>>(INT)}, {name ".b64", op<f<u64>>(LONG, 2)}
#define PTX_COMPARE(name, f) \
  PTX_ORDERED("setp." name, f), {"setp." name ".b32", op<f<u32>>(INT)}, {"setp." name ".b64", op<f<u64>>(LONG, 2)}, \
  {"setp." name ".s16", op<of16<f<s32>>>(INT)}, {"setp." name ".b16", op<of16<f<s32>>>(INT)}, \
  PTX_COMPARE_FLOATS(name, f)
#define PTX_COMPARE_FLOATS(name, f) \
  {"setp." name ".f32", op<f<float>>(FLOAT)}, {"setp." name ".f64", op<f<double>>(DOUBLE)}
#define PTX_SAME32(name) {name, op<same<u32>>(FREE)}
#define PTX_SAME64(name) {name, op<same<u64>>(FREE)}
#define PTX_SELECT32(name) {name, op<choose<u32>>(INT)}
#define PTX_SELECT64(name) {name, op<choose<u64>>(LONG, 2)}

inline void whole_numbers(entries &t) {
  t.insert({PTX_WRAPS("add", add), PTX_WRAPS("sub", sub), PTX_WRAPS("mul.lo", mul), PTX_WRAPS("mad.lo", mad),
            PTX_ORDERED("min", lesser), PTX_ORDERED("max", greater), PTX_BITS("and", both), PTX_BITS("or", either),
            PTX_BITS("xor", differ), PTX_BITS("not", inverse), PTX_COMPARE("eq", eq), PTX_COMPARE("ne", ne),
            PTX_COMPARE("lt", lt), PTX_COMPARE("le", le), PTX_COMPARE("gt", gt), PTX_COMPARE("ge", ge)});
  t.insert({{"div.u32", op<quotient<u32>>(INT, 18)}, {"div.s32", op<quotient32>(INT, 18)},
            {"rem.u32", op<rest<u32>>(INT, 18)}, {"rem.s32", op<rest32>(INT, 18)},
            {"div.u64", op<quotient<u64>>(LONG, 40)}, {"div.s64", op<quotient<s64>>(LONG, 40)},
            {"rem.u64", op<rest<u64>>(LONG, 40)}, {"rem.s64", op<rest<s64>>(LONG, 40)},
            {"neg.s32", op<wrapped_neg<u32>>(INT)}, {"neg.s64", op<wrapped_neg<u64>>(LONG, 2)},
            {"abs.s32", op<absolute32>(INT)}, {"abs.s64", op<absolute64>(LONG, 2)},
            {"mul.hi.u32", op<high_u32>(INT)}, {"mul.hi.s32", op<high_s32>(INT)}, {"mul.hi.u64", op<high_u64>(LONG, 4)},
            {"mul.wide.u32", op<wide_u32>(INT)}, {"mul.wide.s32", op<wide_s32>(INT)},
            {"mad.wide.u32", op<mad_wide_u32>(INT)}, {"mad.wide.s32", op<mad_wide_s32>(INT)},
            {"shl.b16", op<left<u32>>(INT)}, {"shl.b32", op<left<u32>>(INT)}, {"shl.b64", op<left<u64>>(LONG, 2)},
            {"shr.u16", op<right16>(INT)}, {"shr.u32", op<right<u32>>(INT)}, {"shr.b32", op<right<u32>>(INT)},
            {"shr.s32", op<right<s32>>(INT)}, {"shr.u64", op<right<u64>>(LONG, 2)},
            {"shr.s64", op<right<s64>>(LONG, 2)}, {"clz.b32", op<zeros32>(INT)}, {"clz.b64", op<zeros64>(LONG)},
            {"bfi.b32", op<insert<u32>>(INT)}, {"bfi.b64", op<insert<u64>>(LONG, 2)}});
  t.insert({{"add.cc.u32", carries<'a', false, true>()}, {"addc.u32", carries<'a', true, false>()},
            {"addc.cc.u32", carries<'a', true, true>()}, {"sub.cc.u32", carries<'s', false, true>()},
            {"subc.u32", carries<'s', true, false>()}, {"subc.cc.u32", carries<'s', true, true>()},
            {"mad.lo.cc.u32", carries<'l', false, true>()}, {"madc.lo.cc.u32", carries<'l', true, true>()},
            {"madc.lo.u32", carries<'l', true, false>()}, {"mad.hi.cc.u32", carries<'h', false, true>()},
            {"madc.hi.cc.u32", carries<'h', true, true>()}, {"madc.hi.u32", carries<'h', true, false>()}});
}
inline void moves(entries &t) {
  t.insert({PTX_SAME32("mov.b16"), PTX_SAME32("mov.u16"), PTX_SAME32("mov.b32"), PTX_SAME32("mov.u32"),
            PTX_SAME32("mov.s32"), PTX_SAME32("mov.f32"), PTX_SAME64("mov.b64"), PTX_SAME64("mov.u64"),
            PTX_SAME64("mov.s64"), PTX_SAME64("mov.f64"), PTX_SAME64("cvta.to.global.u64"),
            PTX_SAME64("cvta.global.u64"), {"cvta.local.u64", op<local_address>(FREE)},
            {"cvta.shared.u64", op<shared_address>(FREE)}, {"cvta.to.local.u64", op<plain_address>(FREE)},
            {"cvta.to.shared.u64", op<plain_address>(FREE)}, {"mov.pred", op<same<bool>>(FREE)},
            {"and.pred", op<both<bool>>(INT)}, {"or.pred", op<either<bool>>(INT)}, {"xor.pred", op<differ<bool>>(INT)},
            {"not.pred", op<negated>(INT)}});
  t.insert({PTX_SELECT32("selp.b16"), PTX_SELECT32("selp.u16"), PTX_SELECT32("selp.b32"), PTX_SELECT32("selp.u32"),
            PTX_SELECT32("selp.s32"), PTX_SELECT32("selp.f32"), PTX_SELECT64("selp.b64"), PTX_SELECT64("selp.u64"),
            PTX_SELECT64("selp.s64"), PTX_SELECT64("selp.f64")});
  t.insert({{"cvt.u64.u32", op<cast<u64, u32>>(INT, 0.5)}, {"cvt.s64.s32", op<cast<s64, s32>>(INT, 0.5)},
            {"cvt.u32.u64", op<cast<u32, u64>>(FREE)}, {"cvt.s32.s64", op<cast<u32, u64>>(FREE)},
            {"cvt.s64.s16", op<extended<s64, int16_t>>(INT)}, {"cvt.s32.s16", op<extended<s32, int16_t>>(INT)},
            {"cvt.s16.s8", op<extended<s32, int8_t>>(INT)}, {"cvt.s32.s8", op<extended<s32, int8_t>>(INT)},
            {"cvt.u32.u8", op<extended<u32, uint8_t>>(INT)}, {"cvt.u16.u8", op<extended<u32, uint8_t>>(INT)},
            {"cvt.u32.u16", op<extended<u32, uint16_t>>(INT)}, {"cvt.u64.u16", op<extended<u64, uint16_t>>(INT)},
            {"cvt.u16.u32", op<extended<u32, uint16_t>>(INT, 0.5)}});
}
inline void floats(entries &t) {
  t.insert({{"add.f32", op<add<float>>(FLOAT)}, {"add.rn.f32", op<add<float>>(FLOAT)},
            {"sub.f32", op<sub<float>>(FLOAT)}, {"sub.rn.f32", op<sub<float>>(FLOAT)},
            {"mul.f32", op<mul<float>>(FLOAT)}, {"mul.rn.f32", op<mul<float>>(FLOAT)},
            {"fma.rn.f32", op<fused>(FMA)}, {"fma.rm.f32", op<fused_down>(FMA)}, {"add.rz.f32", op<add_to_zero>(FLOAT)},
            {"max.f32", op<larger>(FLOAT)}, {"min.f32", op<smaller>(FLOAT)}, {"neg.f32", op<neg<float>>(FLOAT)},
            {"abs.f32", op<absolute_f32>(FLOAT)}, {"copysign.f32", op<signed_as>(FLOAT)},
            {"div.rn.f32", op<divided<float>>(SPECIAL, 10)}, {"sqrt.rn.f32", op<root32>(SPECIAL, 8)},
            {"rcp.rn.f32", op<inverse_of<float>>(SPECIAL, 8)}, {"rcp.approx.ftz.f32", op<inverse_flushed>(SPECIAL)},
            {"ex2.approx.ftz.f32", op<exp2_flushed>(SPECIAL)}, {"ex2.approx.f32", op<exp2_of>(SPECIAL, 2)},
            {"lg2.approx.f32", op<log2_of>(SPECIAL, 2)}, {"rsqrt.approx.f32", op<inverse_root>(SPECIAL, 2)},
            {"cvt.rna.tf32.f32", op<tf32>(SPECIAL)}, {"cvt.rn.bf16x2.f32", op<bf16_pair>(SPECIAL)},
            {"cvt.sat.f32.f32", op<saturated>(FLOAT)}, {"cvt.rpi.f32.f32", op<whole_float<ceilf>>(FLOAT)},
            {"cvt.rmi.f32.f32", op<whole_float<floorf>>(FLOAT)}, {"cvt.rni.f32.f32", op<whole_float<rintf>>(FLOAT)},
            {"cvt.rn.f32.s32", op<cast<float, s32>>(SPECIAL)}, {"cvt.rn.f32.u32", op<cast<float, u32>>(SPECIAL)},
            {"cvt.rn.f32.s64", op<cast<float, s64>>(SPECIAL)}, {"cvt.rn.f32.u64", op<cast<float, u64>>(SPECIAL)},
            {"cvt.rni.s32.f32", op<whole_f32<rint>>(SPECIAL)}, {"cvt.rzi.s32.f32", op<whole_f32<trunc>>(SPECIAL)}});
  t.insert({{"add.f64", op<add<double>>(DOUBLE)}, {"add.rn.f64", op<add<double>>(DOUBLE)},
            {"sub.f64", op<sub<double>>(DOUBLE)}, {"mul.f64", op<mul<double>>(DOUBLE)},
            {"mul.rn.f64", op<mul<double>>(DOUBLE)}, {"fma.rn.f64", op<fused64>(DOUBLE)},
            {"div.rn.f64", op<divided<double>>(DOUBLE, 20)}, {"sqrt.rn.f64", op<root64>(DOUBLE, 20)},
            {"rcp.rn.f64", op<inverse_of<double>>(DOUBLE, 12)}, {"neg.f64", op<neg<double>>(DOUBLE)},
            {"abs.f64", op<absolute_f64>(DOUBLE)}, {"cvt.f64.f32", op<cast<double, float>>(DOUBLE)},
            {"cvt.rn.f32.f64", op<cast<float, double>>(DOUBLE)}, {"cvt.rn.f64.s64", op<cast<double, s64>>(DOUBLE)},
            {"cvt.rn.f64.u64", op<cast<double, u64>>(DOUBLE)}, {"cvt.rn.f64.s32", op<cast<double, s32>>(DOUBLE)},
            {"cvt.rn.f64.u32", op<cast<double, u32>>(DOUBLE)}, {"cvt.rni.s32.f64", op<whole<rint>>(DOUBLE)},
            {"cvt.rzi.f64.f64", op<whole_double>(DOUBLE)}, {"rcp.approx.ftz.f64", op<inverse_high>(DOUBLE)}});
  t.insert({PTX_COMPARE_FLOATS("equ", equ), PTX_COMPARE_FLOATS("neu", neu), PTX_COMPARE_FLOATS("ltu", ltu),
            PTX_COMPARE_FLOATS("leu", leu), PTX_COMPARE_FLOATS("gtu", gtu), PTX_COMPARE_FLOATS("geu", geu),
            PTX_COMPARE_FLOATS("num", num), PTX_COMPARE_FLOATS("nan", nan)});
}
inline const entries &table() {
  static entries t;
  if (t.empty()) whole_numbers(t), moves(t), floats(t);
  return t;
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>memory: loads and stores, checked and counted
   ------------------------------------------------------------------------------------------------------------------ */
inline bool on_device(u64 at, size_t bytes) {
  return (at >= m.begin && at + bytes <= m.end) || (m.find(at, bytes, m.begin, m.end) && at + bytes <= m.end);
}
/* A word of shared memory is written by one warp between two barriers, and read by others only after one. */
inline bool shared_in_order(warp &w, int lane, u64 at, unsigned bytes, bool store) {
  for (u64 k = at / 4; k <= (at + bytes - 1) / 4; k++) {
    shadow &s = m.shadows[k];
    const char *what = store ? "writes" : "reads";
    if (s.sent) return error(&w, lane, "%s shared word %d, to which a copy is under way", what, (int)k), false;
    if (!store && s.written < m.block_epoch) return error(&w, lane, "reads shared word %d, not written", (int)k), false;
    if (s.written == m.epoch && s.writer != w.number)
      return error(&w, lane, "%s shared word %d, which warp %d wrote since the barrier", what, (int)k, s.writer), false;
    if (store && s.seen == m.epoch && s.reader != w.number)
      return error(&w, lane, "writes shared word %d, which another warp read since the barrier", (int)k), false;
    if (store) {
      s.written = m.epoch;
      s.writer = w.number;
    } else {
      s.reader = s.seen != m.epoch || s.reader == w.number ? w.number : -2;
      s.seen = m.epoch;
    }
  }
  return true;
}
/* Shared memory serves a warp by 128 bytes: all lanes, halves or quarters; two words of one bank take two turns. */
inline void count_wavefronts(const u64 at[LANES], u32 lanes, unsigned bytes, instruction &i) {
  const int group = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  for (int from = 0; from < LANES; from += group) {
    u64 word[LANES][LANES];
    int words[LANES] = {}, most = 0;
    for (int l = from; l < from + group; l++)
      for (unsigned b = 0; (lanes >> l & 1) && b < bytes; b += 4) {
        const u64 k = (at[l] + b) / 4;
        const int bank = (int)(k % LANES);
        int n = 0;
        while (n < words[bank] && word[bank][n] != k) n++;
        if (n == words[bank]) word[bank][words[bank]++] = k;
        most = std::max(most, words[bank]);
      }
    i.units += (u64)most;
    i.ideal += most > 0;
  }
}
inline int distinct(u64 *x, int n) {
  if (!std::is_sorted(x, x + n)) std::sort(x, x + n);
  return (int)(std::unique(x, x + n) - x);
}
inline void count_sectors(const u64 at[LANES], u32 lanes, unsigned bytes, instruction &i) {
  u64 sector[LANES], address[LANES];
  int n = 0;
  for (u32 rest = lanes; rest; rest &= rest - 1, n++) sector[n] = at[first(rest)] / 32, address[n] = at[first(rest)];
  i.ideal += ((u64)distinct(address, n) * bytes + 31) / 32;
  n = distinct(sector, n);
  i.units += (u64)n;
  u32 *&touched = m.touched[i.store];
  if (!touched) touched = (u32 *)calloc(SECTORS, sizeof *touched);
  for (int k = 0; k < n && touched; k++) {
    m.now->touched += touched[sector[k] % SECTORS] != m.number;
    touched[sector[k] % SECTORS] = m.number;
  }
}

/* Where a lane's bytes are; null after a finding. */
inline char *place(warp &w, int lane, space_of space, u64 at, const instruction &i) {
  const unsigned bytes = i.width * i.count;
  const char *verb = i.store ? "writes" : "reads";
  const unsigned long long a = at;
  if (at % bytes) return error(&w, lane, "%s %u bytes at %llx", verb, bytes, a), nullptr;
  if (space == SHARED) {
    if (at + bytes > m.shared.size())
      return error(&w, lane, "%s shared byte %llu of %zu", verb, a, m.shared.size()), nullptr;
    return shared_in_order(w, lane, at, bytes, i.store) ? m.shared.data() + at : nullptr;
  }
  if (space == LOCAL || space == PARAM) {
    const size_t size = space == LOCAL ? m.now->local : m.parameters.size();
    if (at + bytes > size) return error(&w, lane, "%s byte %llu of %zu of its own", verb, a, size), nullptr;
    return space == LOCAL ? w.local + (size_t)lane * size + at : m.parameters.data() + at;
  }
  if (!on_device(at, bytes)) return error(&w, lane, "%s %u bytes at %llx, not the device's", verb, bytes, a), nullptr;
  return (char *)at;
}
inline void load(warp &w, int lane, const instruction &i, const char *p) {
  for (unsigned k = 0; k < i.count; k++, p += i.width) {
    u64 x = 0;
    memcpy(&x, p, i.width);
    if (i.is_signed && i.width < 8 && x >> (8 * i.width - 1)) x |= ~0ull << 8 * i.width;
    if (i.to[k].bits == 64) ((u64 *)w.of(i.to[k]))[lane] = x;
    else ((u32 *)w.of(i.to[k]))[lane] = (u32)x;
  }
}
inline void store(warp &w, int lane, const instruction &i, char *p, bool logged) {
  for (unsigned k = 0; k < i.count; k++, p += i.width) {
    const operand &from = i.from[k + 1];
    const u64 x = from.bits == 64 ? lane_of<u64>(w.of(from), lane) : lane_of<u32>(w.of(from), lane);
    if (logged) {
      m.log->push_back({(u64)p, 0, &i});
      memcpy(&m.log->back().old, p, i.width);
    }
    memcpy(p, &x, i.width);
  }
}
inline u64 address(const warp &w, const instruction &i, int lane) {
  const char *p = w.of(i.from[0]);
  return (u64)i.offset + (i.from[0].bits == 64 ? lane_of<u64>(p, lane) : i.from[0].bits ? lane_of<u32>(p, lane) : 0);
}
inline void memory(warp &w, instruction &i, u32 lanes) {
  u64 at[LANES];
  space_of space = i.space;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest);
    at[l] = address(w, i, l);
    if (i.space == GENERIC) {
      const u64 window = at[l] & WINDOW;
      const space_of here = window == IN_LOCAL ? LOCAL : window == IN_SHARED ? SHARED : GLOBAL;
      if (rest != lanes && here != space) return error(&w, l, "takes part in a request to two kinds of memory");
      space = here;
      at[l] &= ~WINDOW;
    }
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest);
    char *p = place(w, l, space, at[l], i);
    if (!p) return;
    if (i.store) store(w, l, i, p, m.log && space == GLOBAL);
    else load(w, l, i, p);
  }
  if (space == SHARED) count_wavefronts(at, lanes, i.width * i.count, i);
  if (space == GLOBAL) count_sectors(at, lanes, i.width * i.count, i);
}

/* The second half of cp.async: what its first half loaded is under way to shared memory, and arrives when its lanes
   wait. It writes then, and now. */
inline void send(warp &w, instruction &i, u32 lanes) {
  sending s = {&i, lanes, {}, {}};
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest);
    s.at[l] = address(w, i, l);
    if (!place(w, l, SHARED, s.at[l], i)) return;
    for (unsigned k = 0; k < i.count; k++) {
      s.value[k][l] = lane_of<u32>(w.of(i.from[k + 1]), l);
      m.shadows[s.at[l] / 4 + k].sent = true;
    }
  }
  count_wavefronts(s.at, lanes, i.width * i.count, i);
  w.sent.push_back(s);
}
inline void arrive(warp &w, instruction &, u32 lanes) {
  for (sending &s : w.sent) {
    for (u32 rest = s.lanes & lanes; rest; rest &= rest - 1) {
      const int l = first(rest);
      for (unsigned k = 0; k < s.by->count; k++) m.shadows[s.at[l] / 4 + k].sent = false;
      char *p = place(w, l, SHARED, s.at[l], *s.by);
      for (unsigned k = 0; p && k < s.by->count; k++) memcpy(p + 4 * k, &s.value[k][l], 4);
    }
    s.lanes &= ~lanes;
  }
  w.sent.erase(std::remove_if(w.sent.begin(), w.sent.end(), [](const sending &s) { return !s.lanes; }), w.sent.end());
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>reading: PTX text to instructions
   ------------------------------------------------------------------------------------------------------------------ */
inline std::string trimmed(const std::string &s) {
  const size_t from = s.find_first_not_of(" \t\r\n"), to = s.find_last_not_of(" \t\r\n");
  return from == std::string::npos ? "" : s.substr(from, to - from + 1);
}
/* parts between commas that no bracket encloses */
inline std::vector<std::string> split(const std::string &s, char at = ',') {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (char c : s) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == at && !depth) parts.emplace_back();
    else parts.back() += c;
  }
  for (std::string &p : parts) p = trimmed(p);
  if (parts.size() == 1 && parts[0].empty()) parts.clear();
  return parts;
}
inline std::string inside(const std::string &s) { return s.substr(1, s.size() - 2); } /* of brackets */
inline int type_bits(const std::string &type) { return type == "pred" ? 1 : atoi(type.c_str() + 1); }
/* The one place after the body that opens at `at` and is not within a comment. */
inline size_t body_end(const std::string &text, size_t at) {
  int depth = 0;
  do {
    if (text[at] == '/' && text[at + 1] == '/') at = text.find('\n', at);
    depth += (text[at] == '{') - (text[at] == '}');
  } while (++at < text.size() && depth);
  return at;
}
/* ".param .align 8 .b8 name[16]" or ".local .b64 name": its name, bytes and alignment */
struct variable { std::string name; size_t bytes, align; };
inline variable read_variable(const std::string &s) {
  const size_t bracket = s.find('['), aligned = s.find(".align");
  const std::string head = trimmed(s.substr(0, bracket));
  const size_t space = head.find_last_of(" \t"), type = head.find_last_of('.', space);
  const size_t unit = (size_t)type_bits(head.substr(type + 1, space - type - 1)) / 8;
  variable v = {head.substr(space + 1), unit, unit};
  if (bracket != std::string::npos) v.bytes *= (size_t)atoll(s.c_str() + bracket + 1);
  if (aligned != std::string::npos) v.align = (size_t)atoi(s.c_str() + aligned + 6);
  return v;
}
inline size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }
/* the first names of every kernel's registers: what a thread knows of its place */
inline constexpr const char *place_name[] = {"%tid.x",   "%tid.y",   "%tid.z",   "%ntid.x",   "%ntid.y",
                                             "%ntid.z",  "%ctaid.x", "%ctaid.y", "%ctaid.z",  "%nctaid.x",
                                             "%nctaid.y", "%nctaid.z", "%laneid"};
inline constexpr size_t PLACES = sizeof place_name / sizeof place_name[0], SLOT = LANES * sizeof(u32);

struct reader {
  struct family { operand first; int count; }; /* %r<8>: eight registers */
  struct symbol { space_of space; s64 at; };
  struct scope {
    std::map<std::string, family> families;
    std::map<std::string, operand> names;
    std::map<std::string, symbol> symbols;
  };
  kernel &k;
  std::vector<scope> scopes;
  std::map<std::string, int> labels;
  std::map<std::pair<int, u64>, u32> constants;
  std::string prefix, end;                 /* of labels, while a function's body is read in place of its call */
  int line = 0, outer = 0, calls = 0;

  explicit reader(kernel &into) : k(into) {}
  [[noreturn]] void bad(const std::string &what) {
    fprintf(stderr, "ptx: %s: cannot read \"%s\"\n", k.name.c_str(), what.c_str());
    exit(2);
  }
  static u32 slots(int bits) { return (u32)(bits == 64 ? 2 * SLOT : SLOT); }
  operand new_register(int bits, int count = 1) {
    operand o;
    o.at = (u32)k.registers;
    o.bits = (uint8_t)(bits == 64 || bits == 1 ? bits : 32);
    k.registers += slots(bits) * (size_t)count;
    return o;
  }
  operand constant(int bits, u64 x) {
    operand o;
    o.bits = (uint8_t)bits;
    o.constant = 1;
    const auto found = constants.find({bits, x});
    if (found != constants.end()) return o.at = found->second, o;
    o.at = constants[{bits, x}] = (u32)k.constants.size();
    k.constants.resize(k.constants.size() + slots(bits));
    for (int l = 0; l < LANES; l++)
      if (bits == 64) ((u64 *)(k.constants.data() + o.at))[l] = x;
      else ((u32 *)(k.constants.data() + o.at))[l] = bits == 1 && x ? ~0u : (u32)x;
    return o;
  }
  bool find_register(const std::string &name, operand &o) {
    for (size_t p = 0; p < PLACES; p++)
      if (name == place_name[p]) return o.at = (u32)(p * SLOT), o.bits = 32, o.constant = 0, true;
    size_t digits = name.size();
    while (digits > 0 && isdigit((unsigned char)name[digits - 1])) digits--;
    for (size_t s = scopes.size(); s-- > 0;) {
      const auto one = scopes[s].names.find(name);
      if (one != scopes[s].names.end()) return o = one->second, true;
      const auto many = scopes[s].families.find(name.substr(0, digits));
      const int number = digits < name.size() ? atoi(name.c_str() + digits) : -1;
      if (many == scopes[s].families.end() || number < 0 || number >= many->second.count) continue;
      o = many->second.first;
      o.at += slots(o.bits) * (u32)number;
      return true;
    }
    return false;
  }
  bool find_symbol(const std::string &name, symbol &found) {
    for (size_t s = scopes.size(); s-- > 0;) {
      const auto one = scopes[s].symbols.find(name);
      if (one != scopes[s].symbols.end()) return found = one->second, true;
    }
    for (const parameter &p : k.parameters) if (p.name == name) return found = {PARAM, (s64)p.offset}, true;
    const auto global = m.globals.find(name);
    if (global == m.globals.end()) return false;
    found = {GLOBAL, (s64)(intptr_t)global->second.data()};
    return true;
  }
  operand source(const std::string &text, int bits) {
    operand o;
    symbol s;
    if (find_register(text, o)) return o;
    if (text.size() > 2 && text[0] == '0' && strchr("fFdD", text[1]))
      return constant(bits, strtoull(text.c_str() + 2, NULL, 16));
    if (isdigit((unsigned char)text[0])) return constant(bits, strtoull(text.c_str(), NULL, 0));
    if (text[0] == '-') return constant(bits, bits == 64 ? (u64)atoll(text.c_str()) : (u32)atoll(text.c_str()));
    if (!find_symbol(text, s)) bad(text);
    return constant(bits, (u64)s.at);
  }
  operand result(const std::string &text, int bits = 64) { /* bits: of a result that nobody reads, written _ */
    operand o;
    if (text == "_") return new_register(bits);
    if (!find_register(text, o)) bad(text);
    return o;
  }

  void declare_registers(const std::string &s) { /* .reg .b32 %r<8>   .reg .pred p, q */
    const std::string rest = trimmed(s.substr(4));
    const size_t gap = rest.find_first_of(" \t");
    const int bits = type_bits(rest.substr(1, gap - 1));
    for (const std::string &name : split(rest.substr(gap))) {
      const size_t many = name.find('<');
      const int count = many == std::string::npos ? 1 : atoi(name.c_str() + many + 1);
      if (many == std::string::npos) scopes.back().names[name] = new_register(bits);
      else scopes.back().families[name.substr(0, many)] = {new_register(bits, count), count};
    }
  }
  void declare_memory(const std::string &s, space_of space) {
    const variable v = read_variable(s);
    size_t &used = space == SHARED ? k.shared : k.local;
    used = up(used, v.align);
    scopes.back().symbols[v.name] = {space, (s64)used};
    used += v.bytes;
  }
  void push(instruction &i) { k.code.push_back(i); }

  void read_body(const std::string &b) {
    for (size_t p = b.find_first_not_of(" \t\r\n"); p != std::string::npos; p = b.find_first_not_of(" \t\r\n", p)) {
      if (!b.compare(p, 2, "//") || !b.compare(p, 7, ".pragma")) { p = b.find('\n', p); continue; }
      if (!b.compare(p, 5, ".loc ") || !b.compare(p, 5, ".loc\t")) { p = read_line(b, p); continue; }
      if (b[p] == '{') { scopes.emplace_back(); p++; continue; }
      if (b[p] == '}') { scopes.pop_back(); p++; continue; }
      std::string statement;
      bool label = false;
      for (int depth = 0; p < b.size(); p++) {
        if (b[p] == '/' && b[p + 1] == '/') p = b.find('\n', p);
        depth += (b[p] == '{') - (b[p] == '}');
        label = b[p] == ':' && statement.find_first_of(" \t") == std::string::npos;
        if (b[p] == ';' || label) break;
        statement += b[p];
      }
      p++;
      if (label) labels[prefix + statement] = (int)k.code.size();
      else read_statement(trimmed(statement));
    }
  }
  size_t read_line(const std::string &b, size_t p) { /* .loc 1 20 3, function_name f, inlined_at 1 90 5 */
    const size_t stop = b.find('\n', p);
    const std::string s = b.substr(p, stop - p);
    const size_t at = s.find("inlined_at");
    outer = 0;
    sscanf(s.c_str(), ".loc %*d %d", &line);
    if (at != std::string::npos) sscanf(s.c_str() + at, "inlined_at %*d %d", &outer);
    return stop;
  }
  void read_statement(std::string s) {
    if (s.empty()) return;
    if (!s.compare(0, 4, ".reg")) return declare_registers(s);
    if (!s.compare(0, 7, ".shared")) return declare_memory(s, SHARED);
    if (!s.compare(0, 6, ".local") || !s.compare(0, 6, ".param")) return declare_memory(s, LOCAL);
    instruction i;
    i.line = line;
    i.outer = outer;
    if (s[0] == '@') {
      const size_t gap = s.find_first_of(" \t");
      i.negated = s[1] == '!';
      i.guard = result(s.substr(i.negated ? 2 : 1, gap - (i.negated ? 2 : 1)));
      s = trimmed(s.substr(gap));
    }
    const size_t gap = s.find_first_of(" \t\n");
    i.op = s.substr(0, gap);
    const std::vector<std::string> arguments = split(gap == std::string::npos ? "" : s.substr(gap));
    const std::vector<std::string> part = split(i.op, '.');
    const std::string &verb = part[0];
    if (verb == "bra" || verb == "ret" || verb == "exit") read_jump(i, arguments);
    else if (verb == "call") read_call(arguments);
    else if (verb == "bar" || verb == "barrier" || verb == "shfl") read_meeting(i, part, arguments);
    else if (verb == "ld" || verb == "st") read_memory(i, part, arguments);
    else if (verb == "cp") read_sending(i, arguments);
    else if (verb == "mma") read_matrices(i, arguments);
    else read_arithmetic(i, part, arguments);
  }
  void read_jump(instruction &i, const std::vector<std::string> &arguments) {
    const bool leaves = arguments.empty() && prefix.empty();
    i.kind = leaves ? RETURN : BRANCH;
    i.work = JUMP;
    i.label = arguments.empty() ? end : prefix + arguments[0];
    push(i);
  }
  void read_meeting(instruction &i, const std::vector<std::string> &part, const std::vector<std::string> &a) {
    i.work = MEET;
    if (part[0] == "shfl") {
      const size_t bar = a[0].find('|');
      i.kind = SHUFFLE;
      i.mode = part[2][0];
      i.to[0] = result(a[0].substr(0, bar));
      if (bar != std::string::npos) i.to[1] = result(a[0].substr(bar + 1));
      for (size_t n = 0; n < 4; n++) i.from[n] = source(a[n + 1], 32);
    } else if (part[1] == "warp") {
      i.kind = WARP_BARRIER;
      i.from[3] = source(a[0], 32);
    } else {
      i.kind = BARRIER;
      i.mode = part[1] == "red" ? part[2][0] : 0;
      if ((i.mode && i.mode != 'a' && i.mode != 'o') || a.size() > (i.mode ? 3u : 1u)) bad(i.op);
      if (i.mode) i.to[0] = result(a[0]), i.from[0] = source(a[2], 1);
    }
    push(i);
  }
  void read_memory(instruction &i, const std::vector<std::string> &part, const std::vector<std::string> &a) {
    const std::string &type = part.back();
    i.run = memory;
    i.store = part[0] == "st";
    i.width = (unsigned)type_bits(type) / 8;
    i.is_float = type[0] == 'f';
    i.is_signed = type[0] == 's';
    for (const std::string &p : part) {
      if (p == "global") i.space = GLOBAL;
      if (p == "shared") i.space = SHARED;
      if (p == "local") i.space = LOCAL;
      if (p == "param") i.space = PARAM;
      if (p == "v2" || p == "v4") i.count = (unsigned)(p[1] - '0');
    }
    const std::string address = inside(a[i.store ? 0 : 1]), &values = a[i.store ? 1 : 0];
    const size_t plus = address.find('+');
    const std::string base = trimmed(address.substr(0, plus));
    symbol s;
    i.offset = plus == std::string::npos ? 0 : atoll(address.c_str() + plus + 1);
    if (!find_register(base, i.from[0])) {
      if (!find_symbol(base, s)) bad(base);
      i.offset += s.at;
      i.space = s.space;
    }
    const std::vector<std::string> list = values[0] == '{' ? split(inside(values)) : std::vector<std::string>{values};
    for (size_t n = 0; n < list.size(); n++)
      if (i.store) i.from[n + 1] = source(list[n], i.width == 8 ? 64 : 32);
      else i.to[n] = result(list[n]);
    i.work = i.space == SHARED ? SHAREDS : i.space == LOCAL ? LOCALS : i.space == PARAM ? FREE : GLOBALS;
    push(i);
  }
  void read_sending(instruction &i, const std::vector<std::string> &a) {
    if (i.op == "cp.async.wait_all") {
      i.work = MEET;
      i.run = arrive;
      return push(i);
    }
    if (i.op != "cp.async.cg.shared.global" || a.size() != 3 || atoi(a[2].c_str()) != 16) bad(i.op);
    instruction loads = i;
    std::string values = "{";
    for (int n = 0; n < 4; n++) {
      const std::string name = "%sent" + std::to_string(n);
      if (!scopes[0].names.count(name)) scopes[0].names[name] = new_register(32);
      values += (n ? ", " : "") + name;
    }
    read_memory(loads, split("ld.global.v4.b32", '.'), {values + "}", a[1]});
    read_memory(i, split("st.shared.v4.b32", '.'), {a[0], values + "}"});
    k.code.back().run = send;
    k.code.back().weight = 0;              /* is the load's */
  }
  void read_matrices(instruction &i, const std::vector<std::string> &a) {
    const bool halves = i.op == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32";
    if (!halves && i.op != "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32") bad(i.op);
    i.run = halves ? multiply_matrices<true> : multiply_matrices<false>;
    i.work = TENSOR;
    size_t n = 0;
    for (const std::string &s : split(inside(a[0]))) i.to[n++] = result(s);
    n = 0;
    for (size_t matrix = 1; matrix < 4; matrix++)
      for (const std::string &s : split(inside(a[matrix]))) i.from[n++] = source(s, 32);
    push(i);
  }
  void read_arithmetic(instruction &i, const std::vector<std::string> &part, const std::vector<std::string> &a) {
    if (part[0] == "mov" && (a[0][0] == '{' || a[1][0] == '{')) {
      const std::vector<std::string> halves = split(inside(a[a[0][0] == '{' ? 0 : 1]));
      i.run = a[0][0] == '{' ? unpack : pack;
      if (part[1] != "b64") bad(i.op);
      if (i.run == unpack) i.to[0] = result(halves[0]), i.to[1] = result(halves[1]), i.from[0] = source(a[1], 64);
      else i.to[0] = result(a[0]), i.from[0] = source(halves[0], 32), i.from[1] = source(halves[1], 32);
      return push(i);
    }
    const auto found = table().find(i.op);
    if (found == table().end()) bad(i.op);
    const entry &e = found->second;
    if (a.size() != e.from.size() + 1) bad(i.op);
    i.run = e.run;
    i.work = e.work;
    i.weight = e.weight;
    i.to[0] = result(a[0], e.to);
    if (i.to[0].bits != e.to) bad(i.op + " " + a[0]);
    for (size_t n = 0; n < e.from.size(); n++) {
      i.from[n] = source(a[n + 1], e.from[n]);
      if (i.from[n].bits == 64 && e.from[n] == 32 && part[0] == "cvt") { /* the low half of a wide register */
        instruction low = i;
        low.op = "cvt.u32.u64";
        low.run = table().at(low.op).run;
        low.work = FREE;
        low.from[0] = i.from[n];
        i.from[n] = low.to[0] = new_register(32);
        push(low);
      }
      if (i.from[n].bits != e.from[n]) bad(i.op + " " + a[n + 1]);
    }
    push(i);
  }
  /* call.uni (result), function, (arguments): its body stands here, and its names mean the caller's */
  void read_call(const std::vector<std::string> &a) {
    const auto found = m.kernels.find(a[1]);
    if (found == m.kernels.end()) bad(a[1]);
    const std::vector<std::string> arguments = split(inside(a[2])), results = split(inside(a[0]));
    const std::string caller = prefix, caller_end = end;
    scope names;
    for (size_t n = 0; n < arguments.size(); n++)
      if (!find_symbol(arguments[n], names.symbols[found->second.parameters[n].name])) bad(arguments[n]);
    if (!find_symbol(results[0], names.symbols["func_retval0"])) bad(results[0]);
    prefix = "call " + std::to_string(calls++) + " ";
    end = prefix + "end";
    scopes.push_back(names);
    read_body(found->second.body);
    scopes.pop_back();
    labels[end] = (int)k.code.size();
    prefix = caller;
    end = caller_end;
  }
  void read() {
    k.registers = up(PLACES * SLOT, 64);
    k.constants.clear();
    k.code.clear();
    k.shared = k.local = 0;
    scopes.assign(1, scope());
    scopes[0].symbols["lunacu_dynamic"] = {SHARED, 0};
    read_body(k.body);
    if (k.shared && k.body.find("lunacu_dynamic") != std::string::npos) bad("shared memory of both kinds");
    for (instruction &i : k.code)
      if (i.kind == BRANCH) {
        if (!labels.count(i.label)) bad(i.label);
        i.target = labels[i.label];
      }
    k.read = true;
  }
};

inline void read_global(const std::string &s) { /* .global .align 8 .b8 name[144] = {8, 93, ...} */
  const size_t equals = s.find('=');
  const variable v = read_variable(trimmed(s.substr(0, equals)));
  std::vector<char> &bytes = m.globals[v.name];
  bytes.assign(v.bytes, 0);
  size_t at = 0;
  if (equals == std::string::npos) return;
  for (const std::string &x : split(inside(trimmed(s.substr(equals + 1))))) bytes[at++] = (char)atoi(x.c_str());
}
inline size_t read_function(const std::string &text, size_t p, bool entry) { /* the place after it */
  const size_t open = text.find_first_of("{;", p), name = text.find(entry ? ".entry" : ")", p) + (entry ? 6 : 1);
  if (text[open] == ';') return open + 1;
  const size_t list = text.find('(', name), list_end = text.find(')', list), most = text.find(".maxntid", list);
  kernel k;
  k.name = trimmed(text.substr(name, list - name));
  k.entry = entry;
  for (const std::string &s : split(text.substr(list + 1, list_end - list - 1))) {
    const variable v = read_variable(s);
    k.parameter_bytes = up(k.parameter_bytes, v.align);
    k.parameters.push_back({v.name, v.bytes, k.parameter_bytes});
    k.parameter_bytes += v.bytes;
  }
  if (most < open) k.most_threads = (unsigned)atoi(text.c_str() + most + 8);
  const size_t end = body_end(text, open);
  k.body = text.substr(open, end - open);
  m.kernels[k.name] = k;
  return end;
}
inline void read_module(const std::string &text) {
  for (size_t p = 0, next; p < text.size(); p = next) {
    next = std::min(text.find('\n', p), text.size() - 1) + 1;
    const std::string s = text.substr(p, next - p);
    const bool entry = s.find(".entry") != std::string::npos;
    if (s.find(".section") != std::string::npos && s.find(".section") < 2) next = body_end(text, text.find('{', p));
    else if (!s.compare(0, 8, ".global ")) read_global(s.substr(0, s.rfind(';')));
    else if (entry || !s.compare(0, 5, ".func")) next = read_function(text, p, entry);
  }
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>running
   ------------------------------------------------------------------------------------------------------------------ */
inline void shuffle(warp &w, instruction &i, u32 lanes) {
  const u32 *a = (const u32 *)w.of(i.from[0]), *by = (const u32 *)w.of(i.from[1]), *c = (const u32 *)w.of(i.from[2]);
  u32 result[LANES] = {}, inside = 0;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const int l = first(rest), segment = (int)(c[l] >> 8 & 31), b = (int)(by[l] & 31);
    const int bound = (l & segment) | ((int)(c[l] & 31) & ~segment);
    int from = i.mode == 'b' ? l ^ b : i.mode == 'i' ? (l & segment) | (b & ~segment) : i.mode == 'u' ? l - b : l + b;
    if (i.mode == 'u' ? from >= bound : from <= bound) inside |= 1u << l;
    else from = l;
    if (!(lanes & lane_of<u32>(w.of(i.from[3]), l) & 1u << from))
      return error(&w, l, "shuffles from lane %d, which takes no part", from);
    result[l] = a[from];
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) ((u32 *)w.of(i.to[0]))[first(rest)] = result[first(rest)];
  if (i.to[1].bits) set_bits(w.of(i.to[1]), inside, lanes);
}
/* Those of `lanes` at a shuffle or a warp's barrier: each waits until all whom its mask names have come. */
inline void meet(warp &w, instruction &i, u32 lanes, u32 pc) {
  const char *const masks = w.of(i.from[3]);
  u32 here = lanes, all = 0;
  for (u32 rest = w.blocked; rest; rest &= rest - 1) if (w.pc[first(rest)] == pc) here |= 1u << first(rest);
  for (u32 rest = here; rest; rest &= rest - 1) {
    const u32 named = lane_of<u32>(masks, first(rest)) & w.exist;
    if (named & w.done) return error(&w, first(rest), "waits for lanes %08x, which have returned", named & w.done);
    if (!(named >> first(rest) & 1)) return error(&w, first(rest), "is not in its own mask %08x", named);
    if (!(named & ~here)) all |= 1u << first(rest);
  }
  w.blocked = (w.blocked & ~all) | (here & ~all);
  for (u32 rest = lanes & ~all; rest; rest &= rest - 1) w.pc[first(rest)] = pc;
  if (!all) return;
  i.executed++;
  if (i.kind == SHUFFLE) shuffle(w, i, all);
  for (u32 rest = all; rest; rest &= rest - 1) w.pc[first(rest)] = pc + 1;
}
inline void go_on(warp &w, u32 lanes, u32 pc) {
  for (u32 rest = lanes; rest; rest &= rest - 1) w.pc[first(rest)] = pc;
}
/* The lanes at `pc`, together, up to where lanes that are further wait, or they part. */
inline void run_together(warp &w, u32 lanes, u32 pc, u32 next) {
  std::vector<instruction> &code = m.now->code;
  for (; pc < next && !m.failed; ) {
    if (pc >= code.size()) { w.done |= lanes; return; }
    instruction &i = code[pc];
    u32 execute = lanes;
    if (i.guard.bits) execute &= *(u32 *)w.of(i.guard) ^ (i.negated ? ~0u : 0);
    m.at = &i;
    if (i.kind == SHUFFLE || i.kind == WARP_BARRIER) return meet(w, i, lanes, pc);
    i.executed++;
    if (i.kind == STRAIGHT) {
      if (execute) i.run(w, i, execute);
      pc++;
    } else if (i.kind == BRANCH) {
      if (execute && execute != lanes) {
        go_on(w, execute, (u32)i.target);
        return go_on(w, lanes & ~execute, pc + 1);
      }
      pc = execute ? (u32)i.target : pc + 1;
    } else if (i.kind == RETURN) {
      w.done |= execute;
      lanes &= ~execute;
      if (!lanes) return;
      pc++;
    } else {
      if (execute != lanes) return error(&w, first(lanes), "comes to a barrier that other lanes pass by");
      if (i.mode) w.vote |= *(u32 *)w.of(i.from[0]) & lanes;
      w.waiting |= lanes;
      return go_on(w, lanes, pc + 1);
    }
  }
  go_on(w, lanes, pc);
}
inline void run_warp(warp &w) {            /* until all its lanes wait at the block's barrier or have returned */
  while (!m.failed) {
    const u32 ready = w.exist & ~w.done & ~w.waiting & ~w.blocked;
    u32 pc = ~0u, next = ~0u, lanes = 0;
    if (!ready && w.blocked) error(&w, first(w.blocked), "waits for lanes that never come");
    if (!ready) return;
    for (u32 rest = ready; rest; rest &= rest - 1) pc = std::min(pc, w.pc[first(rest)]);
    for (u32 rest = ready; rest; rest &= rest - 1)
      if (w.pc[first(rest)] == pc) lanes |= 1u << first(rest);
      else next = std::min(next, w.pc[first(rest)]);
    run_together(w, lanes, pc, next);
  }
}
/* All threads have come to a barrier, or some have not: false when none waits. */
inline bool pass_barrier(std::vector<warp> &warps) {
  bool any = false, voted_all = true, voted_any = false;
  u32 at = ~0u;
  for (warp &w : warps) any = any || w.waiting;
  for (warp &w : warps) {
    if (any && w.waiting != w.exist) return error(&w, first(w.exist & ~w.waiting), "returned and others wait"), false;
    for (u32 rest = w.waiting; rest; rest &= rest - 1) {
      if (at != ~0u && w.pc[first(rest)] != at) return error(&w, first(rest), "waits at another barrier"), false;
      at = w.pc[first(rest)];
    }
    voted_all = voted_all && w.vote == w.exist;
    voted_any = voted_any || w.vote;
  }
  if (!any) return false;
  instruction &i = m.now->code[at - 1];
  for (warp &w : warps) {
    if (i.mode) set_bits(w.of(i.to[0]), (i.mode == 'a' ? voted_all : voted_any) ? ~0u : 0, w.exist);
    w.waiting = w.vote = 0;
  }
  m.epoch++;
  return true;
}
inline void set_place(warp &w, const unsigned grid[3], const unsigned size[3]) {
  u32 *const slot = (u32 *)w.bank[0];
  for (unsigned l = 0; l < LANES; l++) {
    const unsigned t = (unsigned)w.number * LANES + l;
    const unsigned place[PLACES] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1], size[0], size[1],
                                    size[2], m.block[0], m.block[1], m.block[2], grid[0], grid[1], grid[2], l};
    for (unsigned p = 0; p < PLACES; p++) slot[p * LANES + l] = place[p];
  }
}
inline void run_block(std::vector<warp> &warps, const unsigned grid[3], const unsigned size[3]) {
  m.block_epoch = ++m.epoch;
  for (warp &w : warps) {
    w.done = w.waiting = w.blocked = w.vote = 0;
    w.sent.clear();
    memset(w.pc, 0, sizeof w.pc);
    set_place(w, grid, size);
  }
  do {                                     /* the last warp first every other time */
    for (size_t n = 0; n < warps.size() && !m.failed; n++) run_warp(warps[m.epoch & 1 ? warps.size() - 1 - n : n]);
  } while (!m.failed && pass_barrier(warps));
  for (warp &w : warps)
    if (!m.failed && !w.sent.empty()) error(&w, first(w.sent[0].lanes), "returned while what it sent is under way");
}
inline kernel *find_kernel(const std::string &name) {
  const auto found = m.kernels.find(name);
  if (found == m.kernels.end()) return nullptr;
  if (!found->second.read) reader(found->second).read();
  return &found->second;
}
/* False after a finding. An argument is its bytes. */
inline bool launch(const std::string &name, const unsigned grid[3], const unsigned size[3], size_t dynamic,
                   const std::vector<std::vector<char>> &arguments) {
  static std::vector<u64> registers, local;
  kernel *k = m.now = find_kernel(name);
  m.failed = false;
  m.at = nullptr;
  m.begin = 1;
  m.end = 0;
  if (!k) return error(nullptr, 0, "there is no kernel %s in the PTX", name.c_str()), false;
  m.threads = size[0] * size[1] * size[2];
  if (k->most_threads && m.threads > k->most_threads) error(nullptr, 0, "%u threads, too many", m.threads);
  if (arguments.size() != k->parameters.size()) return error(nullptr, 0, "%zu arguments", arguments.size()), false;
  m.parameters.assign(k->parameter_bytes, 0);
  for (size_t n = 0; n < arguments.size(); n++) {
    if (arguments[n].size() != k->parameters[n].size) return error(nullptr, 0, "argument %zu's size", n), false;
    memcpy(m.parameters.data() + k->parameters[n].offset, arguments[n].data(), arguments[n].size());
  }
  m.shared.assign(k->shared + dynamic, (char)0xff);
  m.shadows.assign(m.shared.size() / 4 + 1, shadow());
  m.epoch = 0;
  std::vector<warp> warps((m.threads + LANES - 1) / LANES);
  const size_t each = up(k->registers, 64) / 8, own = up(k->local * LANES, 64) / 8;
  if (registers.size() < warps.size() * each + 8) registers.resize(warps.size() * each + 8);
  local.assign(warps.size() * own + 8, ~0ull);
  for (unsigned n = 0; n < warps.size(); n++) {
    warp &w = warps[n];
    const unsigned left = m.threads - n * LANES;
    w.bank[0] = (char *)(up((size_t)registers.data(), 64) + n * each * 8);
    w.bank[1] = k->constants.data();
    w.local = (char *)(local.data() + n * own);
    w.exist = left >= LANES ? ~0u : (1u << left) - 1;
    w.carry = 0;
    w.number = (int)n;
  }
  k->launches++;
  m.number++;
  for (m.block[2] = 0; m.block[2] < grid[2]; m.block[2]++)
    for (m.block[1] = 0; m.block[1] < grid[1]; m.block[1]++)
      for (m.block[0] = 0; m.block[0] < grid[0] && !m.failed; m.block[0]++) run_block(warps, grid, size);
  m.now = nullptr;
  return !m.failed;
}
}  // namespace ptx
#endif
