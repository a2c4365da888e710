// The CPU kernels on torch's own thread pool.

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../core/layout.h"
#include "../cpu/api.h"
#include "device.h"

namespace int4_emu::binding {

struct DeviceScope::Guard {};  // a CPU needs none

namespace device {

const bool kHostReadsValues = true;

namespace {

// Honours torch.set_num_threads. An exception in a body is carried out of the pool (torch before 2.13 loses it).
Parallel pool() {
  Parallel p;
  p.threads = static_cast<int>(torch::stable::get_num_threads());
  p.run = [](void*, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* argument) {
    std::exception_ptr error;
    std::mutex lock;
    torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
      try {
        body(argument, begin, end);
      } catch (...) {
        const std::lock_guard<std::mutex> hold(lock);
        error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
  };
  return p;
}

// A large workspace or result is new to the process in every call: in huge pages, where the system has them on request, it costs few page
// faults.
void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t first = reinterpret_cast<uintptr_t>(data), begin = (first + kPage - 1) & ~(kPage - 1), end = (first + bytes) & ~(kPage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#else
  (void)data, (void)bytes;
#endif
}

// Memory that stays with the process from call to call: as new memory in every call it would cost a page fault and a clearing for all of its
// pages, in large calls a tenth of their time. A call beside another has memory of its own.
class KeptWorkspace {
 public:
  KeptWorkspace(const Tensor& like, size_t bytes) : block_(spare().exchange(nullptr)) {
    if (block_ != nullptr && block_->bytes >= bytes) return;
    block_.reset();
    block_ = std::make_unique<Block>(like, bytes);
  }
  ~KeptWorkspace() {
    if (block_->bytes <= kMostKept) block_.reset(spare().exchange(block_.release()));
  }
  KeptWorkspace(const KeptWorkspace&) = delete;
  KeptWorkspace& operator=(const KeptWorkspace&) = delete;
  void* data() const { return block_->memory.data(); }

 private:
  static constexpr size_t kMostKept = size_t{256} << 20;
  struct Block {
    Block(const Tensor& like, size_t size) : memory(like, size), bytes(size) { advise_huge_pages(memory.data(), size); }
    Workspace memory;
    size_t bytes;
  };
  // Never freed: threads may still compute when the process ends.
  static std::atomic<Block*>& spare() {
    static std::atomic<Block*> block{nullptr};
    return block;
  }
  std::unique_ptr<Block> block_;
};

}  // namespace

Status unpack(const PackedMatrix& m, uint8_t* out) { return cpu::unpack(m, out, pool()); }
Status unpack_zeros(const PackedMatrix& m, uint8_t* out) { return cpu::unpack_zeros(m, out, pool()); }
Status dequantize(const PackedMatrix& m, DType out_dtype, void* out) {
  advise_huge_pages(out, m.batch * m.out_features * m.in_features * dtype_bytes(out_dtype));
  return cpu::dequantize(m, out_dtype, out, pool());
}
Status repack(const PackedMatrix& m, const int32_t* in_perm, const int32_t* out_perm, const RepackOut& out) {
  return cpu::repack(m, in_perm, out_perm, out, pool());
}
Status prepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout) {
  advise_huge_pages(out, batch * n * row_bytes(k, bits));
  return cpu::prepack(in, out, batch, n, k, bits, layout, pool());
}
Status unprepack(const uint8_t* in, uint8_t* out, int64_t batch, int64_t n, int64_t k, int bits, Layout layout) {
  advise_huge_pages(out, batch * n * row_bytes(k, bits));
  return cpu::unprepack(in, out, batch, n, k, bits, layout, pool());
}
Status moe_align(const AlignProblem& p, const Tensor&) { return cpu::moe_align(p); }

Status fused_moe(const MoeProblem& p, const Tensor& like) {
  const Parallel parallel = pool();
  const size_t bytes = cpu::moe_workspace_bytes(p, parallel.threads);
  const KeptWorkspace workspace(like, bytes);
  return cpu::fused_moe(p, workspace.data(), bytes, parallel);
}

Status grouped_gemm(GroupedGemmProblem p, const Tensor& offsets, const Tensor& like) {
  std::vector<int64_t> wide(static_cast<size_t>(offsets.numel()));
  for (size_t e = 0; e < wide.size(); ++e) wide[e] = read_index(offsets, static_cast<int64_t>(e));
  p.offsets = wide.data();
  const Parallel parallel = pool();
  const size_t bytes = cpu::grouped_gemm_workspace_bytes(p, parallel.threads);
  const KeptWorkspace workspace(like, bytes);
  return cpu::grouped_gemm(p, workspace.data(), bytes, parallel);
}

}  // namespace device

namespace {
thread_local const Tensor* innermost = nullptr;
}

DeviceScope::DeviceScope(const Tensor& first) : outer_(innermost) { innermost = &first; }
DeviceScope::~DeviceScope() { innermost = outer_; }
const Tensor& DeviceScope::first() { return *innermost; }

}  // namespace int4_emu::binding
