/* tests/cuda/ptx_host.h: between the emulator's launches and tests/cuda/ptx.h */
#include "cuda_host.h"
#include "ptx.h"
#include "ptx_host.h"
#include <cxxabi.h>
#include <dlfcn.h>
#include <set>

namespace {
using cudahost::launch;
/* of what was compared, by kernel; worst: the largest difference in units of the store's largest value */
struct comparison { double values = 0, equal = 0, worst = 0; };
struct resources { int registers = 0, spills = 0; };
std::map<std::string, comparison> compared;
std::map<std::string, resources> resources_of;
std::set<std::string> common;                 /* kernels of the first table */
std::string sentence;                      /* the launch's first finding */
ptx::instruction whole, *broken = nullptr; /* what ptx_break broke, as it was and where it is */
constexpr size_t MOST_COPIED = (size_t)1 << 20, MOST_COPIED_A_THREAD = 1024;
/* FMA's rounding: a difference of so much of the largest value that the same instruction stored; and of kernels that
   round factors to few bits, where one may fall to the other side */
constexpr double NEAR = 5e-5, NEAR_ROUNDED = 2e-3;
/* lunacu_forget_weights_kernel stores doubles in two halves. The low half may differ by so much of the largest value
   that the kernel stored, since the high half may round to the other side. */
constexpr double NEAR_LOW_HALF = 5e-9;

bool find(uint64_t at, size_t bytes, uint64_t &begin, uint64_t &end) {
  for (auto &g : ptx::m.globals) {
    begin = (uint64_t)(uintptr_t)g.second.data();
    end = begin + g.second.size();
    if (at >= begin && at + bytes <= end) return true;
  }
  for (auto *kind : {&cudahost::m.device, &cudahost::m.pinned}) {
    auto found = kind->upper_bound((uintptr_t)at);
    if (found == kind->begin()) continue;
    --found;
    begin = found->first;
    end = begin + found->second;
    if (at + bytes <= end) return true;
  }
  return false;
}
std::string name_of(const launch &l) {
  Dl_info info;
  return dladdr(l.function, &info) && info.dli_sname && info.dli_saddr == l.function ? info.dli_sname : l.name;
}
bool run(const launch &l, const std::string &name) {
  const unsigned grid[3] = {l.grid.x, l.grid.y, l.grid.z}, block[3] = {l.block.x, l.block.y, l.block.z};
  sentence.clear();
  return ptx::launch(name, grid, block, l.shared, l.arguments);
}
void finding(const launch &l, const std::string &s) {
  cudahost::m.now = &l;
  cudahost::report(-1, nullptr, 0, "%s", s.c_str());
  cudahost::m.now = nullptr;
}

/* copies of the device's allocations, unless they are too large for the launch's own time: kernels find pointers in
   tables too */
struct memory_copy { uintptr_t at; std::vector<char> bytes; };
std::vector<memory_copy> copy_memory(const launch &l) {
  const size_t threads = (size_t)l.grid.x * l.grid.y * l.grid.z * l.block.x * l.block.y * l.block.z;
  std::vector<memory_copy> copies;
  size_t sum = 0;
  for (auto &a : cudahost::m.device) sum += a.second;
  if (sum > std::max(MOST_COPIED, threads * MOST_COPIED_A_THREAD)) return copies;
  for (auto &a : cudahost::m.device)
    copies.push_back({a.first, std::vector<char>((char *)a.first, (char *)a.first + a.second)});
  return copies;
}
/* Where memory is another than in the copies, and no store of the PTX's went: the emulator alone stored. */
void find_lost(const launch &l, std::vector<memory_copy> &copies, const std::vector<ptx::stored> &log) {
  for (memory_copy &c : copies) {
    for (const ptx::stored &s : log)
      if (s.at >= c.at && s.at < c.at + c.bytes.size()) memcpy(&c.bytes[s.at - c.at], (void *)s.at, s.by->width);
    for (size_t i = 0; i < c.bytes.size(); i++)
      if (c.bytes[i] != ((const char *)c.at)[i]) {
        char text[120];
        snprintf(text, sizeof text, "the PTX does not store to %p, the emulator does", (void *)(c.at + i));
        return finding(l, text);
      }
  }
}
double value(uint64_t bits, unsigned width) {
  double d;
  float f;
  const uint32_t low = (uint32_t)bits;
  memcpy(&d, &bits, sizeof d);
  memcpy(&f, &low, sizeof f);
  return width == 8 ? d : f;
}
void compare(const launch &l, const std::string &name, const std::vector<ptx::stored> &log,
             const std::vector<uint64_t> &mine) {
  std::map<const ptx::instruction *, double> largest;
  comparison &c = compared[name];
  const double near = name.find("tensor") == std::string::npos ? NEAR : NEAR_ROUNDED;
  const bool halves = name.find("lunacu_forget_weights_kernel") != std::string::npos;
  bool told = false;
  double largest_of_all = 0;
  for (size_t i = 0; i < log.size(); i++) {
    double &top = largest[log[i].by];
    uint64_t bits = 0;
    memcpy(&bits, (void *)log[i].at, log[i].by->width);
    const double x = fabs(value(bits, log[i].by->width));
    if (x < INFINITY) top = std::max(top, x);
    if (log[i].by->is_float) largest_of_all = std::max(largest_of_all, top);
  }
  for (size_t i = 0; i < log.size(); i++) {
    const unsigned width = log[i].by->width;
    uint64_t bits = 0;
    memcpy(&bits, (void *)log[i].at, width);
    const double a = value(mine[i], width), b = value(bits, width), top = largest[log[i].by];
    const bool equal = bits == mine[i] || (log[i].by->is_float && (a == b || (a != a && b != b)));
    const double off = equal ? 0 : fabs(a - b) / std::max(top, 1e-37);
    c.values++;
    c.equal += equal;
    if (equal || (log[i].by->is_float && off <= near)) { c.worst = std::max(c.worst, off); continue; }
    if (halves && log[i].by->is_float && fabs(a - b) <= NEAR_LOW_HALF * largest_of_all) continue;
    if (told) continue;
    char text[300];
    snprintf(text, sizeof text, "luna_cuda.cuh:%d: the PTX stores %.9g (%llx), the emulator %.9g (%llx), the largest "
             "%g", log[i].by->line, a, (unsigned long long)mine[i], b, (unsigned long long)bits, top);
    told = true;
    finding(l, text);
  }
}
void run_both(const launch &l) {
  static std::vector<ptx::stored> log;
  const std::string name = name_of(l);
  const long errors = cuda_host.errors;
  std::vector<memory_copy> copies = copy_memory(l);
  log.clear();
  ptx::m.log = &log;
  const bool good = run(l, name);
  ptx::m.log = nullptr;
  std::vector<uint64_t> mine(log.size());
  for (size_t i = 0; i < log.size(); i++) memcpy(&mine[i], (void *)log[i].at, log[i].by->width);
  for (size_t i = log.size(); i-- > 0;) memcpy((void *)log[i].at, &log[i].old, log[i].by->width);
  cudahost::emulate(l);
  if (cuda_host.errors != errors) return; /* the emulator found what is wrong */
  if (!good) return finding(l, sentence);
  compare(l, name, log, mine);
  find_lost(l, copies, log);
}
void run_alone(const launch &l) {
  cudahost::m.now = &l;
  const bool good = cudahost::pointers_are_good(l);
  cudahost::m.now = nullptr;
  if (good && !run(l, name_of(l))) finding(l, sentence);
}

bool read_all(const char *file, std::string &text) {
  FILE *f = fopen(file, "rb");
  char buffer[65536];
  if (!f) return false;
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;) text.append(buffer, n);
  fclose(f);
  return true;
}
void read_registers(const std::string &text) {
  std::string name;
  for (const std::string &s : ptx::split(text, '\n')) {
    const size_t entry = s.find("entry function '"), used = s.find("Used "), spill = s.find(" bytes spill stores");
    if (entry != std::string::npos) name = s.substr(entry + 16, s.find('\'', entry + 16) - entry - 16);
    if (used != std::string::npos) resources_of[name].registers = atoi(s.c_str() + used + 5);
    if (spill != std::string::npos) resources_of[name].spills = atoi(s.c_str() + s.rfind(',', spill) + 1);
  }
}

/* ---------------------------------------------------------------------------------------------------------------------
   >>rows of the table
   ------------------------------------------------------------------------------------------------------------------ */
std::string shown(const std::string &name) { /* demangled, without its arguments and what every name has */
  int status;
  char *plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string s = plain ? plain : name;
  free(plain);
  s = s.substr(s.find("lunacu_") == std::string::npos ? 0 : s.find("lunacu_") + 7);
  int depth = 0;
  size_t end = 0;
  for (; end < s.size() && (depth || s[end] != '('); end++) depth += (s[end] == '<') - (s[end] == '>');
  s = s.substr(0, end);
  for (const char *extra : {"lunacu_", "_kernel", "(int)", "(bool)"})
    for (size_t at; (at = s.find(extra)) != std::string::npos;) s.erase(at, strlen(extra));
  return s;
}
struct requests { double units = 0, ideal = 0; };
void print_ratio(const requests &r) {
  if (r.ideal) printf(" %6.2f", r.units / r.ideal);
  else printf("      -");
}
/* an H100: multiprocessors, cycles a second, bytes a second of memory and of the cache that they share */
constexpr double PROCESSORS = 132, CLOCK = 1.755e9, MEMORY = 3.35e12, CACHE = 5.5e12;
/* cycles of a product of matrices, 1024 multiply-adds of TF32 or 2048 of BF16, at an assumed 62% of the tensor cores'
   peak, which needs Hopper's own instructions */
constexpr double MATRICES = 1 / 0.62;
/* Seconds that it takes at least: four instructions a cycle, of which two of whole numbers; a wavefront a cycle; each
   sector once from memory, each request from the cache. */
double seconds(const double by[ptx::WORKS], double all, double touched, double sectors, double wavefronts) {
  const double cycles = std::max({all / 4, (by[ptx::INT] + by[ptx::LONG]) / 2, wavefronts,
                                  by[ptx::TENSOR] * MATRICES}) / PROCESSORS;
  return std::max({cycles / CLOCK, 32 * touched / MEMORY, 32 * sectors / CACHE});
}
/* and cuBLAS, of the multiply-adds of float32 */
constexpr double CUBLAS = 0.8;
struct cost { double seconds = 0, multiplied = 0; }; /* of all kernels; multiply-adds that are not overhead */
/* false: it does too little to matter */
bool print_row(const ptx::kernel &k, double elements, cost &total) {
  double by[ptx::WORKS] = {}, all = 0;
  requests loads, stores, shared;
  for (const ptx::instruction &i : k.code) {
    const double n = i.work == ptx::FREE ? 0 : (double)i.executed * i.weight;
    by[i.work] += n;
    all += n;
    if (i.work != ptx::GLOBALS && i.work != ptx::SHAREDS) continue;
    requests &r = i.work == ptx::SHAREDS ? shared : i.store ? stores : loads;
    r.units += (double)i.units;
    r.ideal += (double)i.ideal;
  }
  const double each = ptx::LANES / elements, touched = (double)k.touched,
               time = seconds(by, all, touched, loads.units + stores.units, shared.units);
  total.seconds += time;
  total.multiplied += by[ptx::FMA] * ptx::LANES;
  if (all * each < 0.5) return false;
  const resources &own = resources_of[k.name];
  printf("  %-46.46s %4llu %8.2f %3.0f%%", shown(k.name).c_str(), (unsigned long long)k.launches,
         all * each,
         100 * by[ptx::FMA] / std::max(all, 1e-9));
  for (int w = 0; w < ptx::FREE; w++) printf(" %7.2f", by[w] * each);
  print_ratio(loads);
  print_ratio(stores);
  print_ratio(shared);
  printf(" %5d %5d %3.0f%% %3.0f%%", own.registers, own.spills, 100 * 32 * touched / MEMORY / time,
         100 * by[ptx::FMA] / 4 / PROCESSORS / CLOCK / time);
  if (by[ptx::TENSOR]) printf(" %3.0f%%", 100 * by[ptx::TENSOR] * MATRICES / PROCESSORS / CLOCK / time);
  printf("\n");
  return true;
}
void print_hot_spots(const ptx::kernel &k) {
  typedef std::pair<int, int> place;
  std::map<place, requests> lines;
  for (const ptx::instruction &i : k.code)
    if (i.units > i.ideal + i.ideal / 5) {
      requests &r = lines[{i.line, i.outer}];
      r.units += (double)i.units;
      r.ideal += (double)i.ideal;
    }
  std::vector<std::pair<double, place>> worst;
  for (auto &l : lines) worst.push_back({l.second.ideal - l.second.units, l.first});
  std::sort(worst.begin(), worst.end());
  for (size_t n = 0; n < worst.size() && n < 4; n++) {
    const requests &r = lines[worst[n].second];
    printf("      luna_cuda.cuh:%d in %d: %.0f for %.0f, %.2f times\n", worst[n].second.first, worst[n].second.second,
           r.units, r.ideal, r.units / r.ideal);
  }
}
}  // namespace

extern "C" bool ptx_opened(void) { return !ptx::m.kernels.empty(); }
extern "C" int ptx_read_all(void) {
  for (auto &k : ptx::m.kernels)
    if (k.second.entry) (void)ptx::find_kernel(k.first);
  return (int)ptx::m.kernels.size();
}
extern "C" void ptx_alone(bool alone) { cudahost::run_launch = alone ? run_alone : run_both; }
extern "C" void ptx_forget(void) {
  cuda_host.multiplied = 0;
  for (auto &k : ptx::m.kernels) {
    k.second.launches = k.second.touched = 0;
    for (ptx::instruction &i : k.second.code) i.reached = i.reached || i.executed, i.executed = i.units = i.ideal = 0;
  }
}
extern "C" void ptx_table_head(void) {
  printf("  %-46s %4s %8s %4s", "kernel", "runs", "all", "fma");
  for (int w = 0; w < ptx::FREE; w++) printf(" %7s", ptx::work_name[w]);
  printf(" %6s %6s %6s %5s %5s %4s %4s %4s\n", "loads", "stores", "waves", "regs", "spill", "hbm", "fp32", "mma");
}
extern "C" void ptx_table(const char *title, double elements, bool whole) {
  const bool is_first = common.empty();
  cost total;
  printf("%s (%.0f elements)\n", title, elements);
  for (auto &k : ptx::m.kernels) {
    if (!k.second.launches || (common.count(k.first) && !whole && !is_first)) continue;
    if (is_first) common.insert(k.first);
    if (print_row(k.second, elements, total) && getenv("PTX_VERBOSE")) print_hot_spots(k.second);
  }
  const double rate = PROCESSORS * 4 * ptx::LANES * CLOCK, products = cuda_host.multiplied / rate / CUBLAS;
  if (whole)
    printf("  at least %.1f us, and %.1f us for cuBLAS's products at %.0f%% of FP32: %.0f%% of FP32 in all\n",
           1e6 * total.seconds, 1e6 * products, 100 * CUBLAS,
           100 * (total.multiplied + cuda_host.multiplied) / rate / (total.seconds + products));
  fflush(stdout);
}
extern "C" bool ptx_break(const char *kernel, ptx_fault what, int n) {
  const char *const verb = what == PTX_BARRIER_REMOVED ? "bar.sync" : what == PTX_FMA_MADE_MUL ? "fma.rn.f32" :
      what == PTX_TF32_REMOVED ? "mma.sync.aligned.m16n8k8" : what == PTX_WAIT_REMOVED ? "cp.async.wait_all" : "st.";
  for (auto &k : ptx::m.kernels)
    for (ptx::instruction &i : k.second.code) {
      if (k.first.find(kernel) == std::string::npos || i.op.compare(0, strlen(verb), verb) ||
          !(i.reached || i.executed) || (i.work != ptx::GLOBALS && i.run == ptx::memory) || n-- > 0) continue;
      whole = i;
      broken = &i;
      if (what == PTX_STORE_MOVED) i.offset += 4;
      if (what == PTX_FMA_MADE_MUL) i.run = ptx::table().at("mul.rn.f32").run;
      if (what != PTX_STORE_MOVED && what != PTX_FMA_MADE_MUL) {
        i.kind = ptx::STRAIGHT;
        i.run = [](ptx::warp &, ptx::instruction &, uint32_t) {};
      }
      return true;
    }
  return false;
}
extern "C" void ptx_mend(void) {
  if (broken) *broken = whole;
  broken = nullptr;
}

namespace {
struct at_start {
  at_start() {
    const char *const ptx = getenv("PTX"), *const log = getenv("PTX_REGISTERS");
    std::string text;
    if (ptx && *ptx && !read_all(ptx, text)) perror(ptx), exit(2);
    if (text.empty()) return;
    ptx::m.find = find;
    ptx::m.tell = [](const char *s) { if (sentence.empty()) sentence = s; };
    ptx::read_module(text);
    ptx_alone(getenv("PTX_ALONE") && *getenv("PTX_ALONE"));
    text.clear();
    if (log && *log && !read_all(log, text)) perror(log), exit(2);
    read_registers(text);
  }
  ~at_start() {
    double values = 0, equal = 0, worst = 0;
    unsigned long long kinds = 0, launches = 0;
    if (!ptx_opened() || !getenv("PTX_VERBOSE")) return;
    for (auto &c : compared) {
      values += c.second.values;
      equal += c.second.equal;
      worst = std::max(worst, c.second.worst);
    }
    for (auto &k : ptx::m.kernels) kinds += k.second.launches > 0, launches += k.second.launches;
    fprintf(stderr, "ptx: %llu kernels, %llu launches; %.0f values compared, %.1f%% the same bits, the rest within "
            "%.1e of the largest\n", kinds, launches, values, 100 * equal / std::max(values, 1.0), worst);
  }
} started;
}  // namespace
