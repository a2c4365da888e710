// grouped_gemm against double precision, and what must not do harm: empty calls, offsets out of order, refusals, graph capture.
#include "layer_reference.h"

namespace selfcheck {
namespace {

void check_case(const std::vector<int64_t>& offsets, int64_t rows, int64_t n, int64_t k, DType type, int bits, bool wide, gpu::Atom atom) {
  if (!next_case(type, bits)) return;
  Random random(static_cast<unsigned>(rows + n));
  const int64_t experts = static_cast<int64_t>(offsets.size()) - 1;
  HostWeight w = bits ? packed_weight(experts, n, k, bits, 32, type, true, 0, random) : dense_weight(experts, n, k, type, false, random);
  w.add_bias(type, random);
  if (bits) w.add_perm(random);
  const Floats x(type, random_floats(rows * k, 1.f, random));
  std::vector<double> want(rows * n, 0.);
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (int64_t c = 0; c < n; ++c) want[r * n + c] = w.dot(e, c, [&](int64_t i) { return x[r * k + i]; });
    }
  }
  const std::vector<int32_t> narrow(offsets.begin(), offsets.end());
  const Buffer<int64_t> device_offsets(offsets);
  const Buffer<int32_t> device_narrow(narrow);
  const Buffer<uint8_t> device_x(x.data);
  // Out at an odd element: no store may assume alignment.
  Buffer<uint8_t> out(rows * n * dtype_bytes(type), static_cast<int>(dtype_bytes(type)));
  GroupedGemmProblem p;
  p.rows = rows, p.x = device_x.get(), p.x_stride = k, p.dtype = type, p.weight = w.w, p.out = out.get();
  Buffer<uint8_t> workspace(gpu::grouped_gemm_workspace_bytes(p));
  const gpu::DeviceOffsets device{wide ? static_cast<const void*>(device_offsets.get()) : device_narrow.get(), wide};
  must(gpu::grouped_gemm(p, device, workspace.get(), workspace.bytes(), nullptr, atom), "grouped_gemm");
  Floats got;
  got.type = type, got.data = out.host();
  double error = relative_error(got, want);
  for (int64_t i = 0; i < rows * n; ++i) {
    if ((i / n < offsets[0] || i / n >= offsets[experts]) && got[i] != 0.f) error += 1;
  }
  char detail[160];
  std::snprintf(detail, sizeof(detail), "%s R=%lld N=%lld K=%lld E=%lld %s bits=%d: error %.2e", gpu::atom_name(atom), (long long)rows,
                (long long)n, (long long)k, (long long)experts, dtype_text(type), bits, error);
  expect(error < tolerance(type, bits > 0 && atom != gpu::Atom::fma) && out.guarded() && workspace.guarded(), "grouped_gemm", detail);
}

}  // namespace

void check_grouped() {
  for (DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (gpu::Atom atom : atoms_for(type)) {
      for (int bits : {0, 4, 8}) {
        check_case({3, 3, 10, 77, 77, 90}, 100, 72, 96, type, bits, true, atom);
        check_case({0, 2, 2, 3}, 3, 40, 64, type, bits, false, atom);
        check_case({0, 131}, 131, 33, 35, type, bits, true, atom);
        check_case({0, 0, 70, 70, 200, 231, 233}, 240, 38, 160, type, bits, false, atom);
        check_case({0, 17, 34, 99, 100}, 100, 300, 224, type, bits, true, atom);
      }
    }
  }
}

void check_limits() {
  Random random(3);
  HostWeight w13 = packed_weight(2, 64, 32, 4, 32, DType::bf16, true, 0, random),
             w2 = packed_weight(2, 32, 32, 4, 32, DType::bf16, true, 0, random);
  const Floats x(DType::bf16, random_floats(4 * 32, 1.f, random));
  const Buffer<uint8_t> device_x(x.data);
  const Buffer<float> weights(std::vector<float>(8, 0.5f));
  Buffer<int32_t> ids(std::vector<int32_t>{0, 1, 1, 0, 0, 0, 1, 1});
  Buffer<uint8_t> out(4 * 32 * 2);
  MoeProblem p;
  p.hidden = 32, p.intermediate = 32, p.topk = 2, p.x = device_x.get(), p.x_stride = 32, p.dtype = DType::bf16, p.w13 = w13.w, p.w2 = w2.w;
  p.topk_weights = weights.get(), p.topk_ids = ids.get(), p.global_experts = 2, p.out = out.get();

  Buffer<uint8_t> small(gpu::moe_workspace_bytes(p));
  must(gpu::fused_moe(p, small.get(), small.bytes(), nullptr), "no tokens");
  const std::vector<uint8_t> untouched(out.bytes(), 0xff);
  expect(out.host() == untouched, "M=0 writes nothing");

  p.tokens = 4;
  Buffer<uint8_t> workspace(gpu::moe_workspace_bytes(p));
  MoeProblem none = p;
  none.w13.experts = none.w2.experts = 0;
  must(gpu::fused_moe(none, workspace.get(), workspace.bytes(), nullptr), "no experts");
  const std::vector<uint8_t> zeros(out.bytes(), 0);
  expect(out.host() == zeros, "E=0 gives zeros");

  expect(!gpu::fused_moe(p, workspace.get(), 1, nullptr), "a small workspace is refused");
  MoeProblem foreign = p;
  foreign.w13.layout = Layout::cpu_n16;
  const Status refused = gpu::fused_moe(foreign, workspace.get(), workspace.bytes(), nullptr);
  expect(!refused, "a foreign layout is refused", refused.message);
  MoeProblem wide = p;
  wide.dtype = DType::f32;
  const Status forced = gpu::fused_moe(wide, workspace.get(), workspace.bytes(), nullptr, gpu::Atom::mma_sm80);
  expect(!forced, "a forced atom that cannot serve is refused", forced.message);

  // Captured once; replayed after the ids changed in place, it must equal a fresh call.
  gpu::Stream stream;
  must(INT4_EMU_RUNTIME(StreamCreate)(&stream), "stream");
  INT4_EMU_RUNTIME(Graph_t) graph;
  INT4_EMU_RUNTIME(GraphExec_t) instance;
  must(INT4_EMU_RUNTIME(StreamBeginCapture)(stream, INT4_EMU_RUNTIME(StreamCaptureModeGlobal)), "capture");
  must(gpu::fused_moe(p, workspace.get(), workspace.bytes(), stream), "captured fused_moe");
  must(INT4_EMU_RUNTIME(StreamEndCapture)(stream, &graph), "end of capture");
  must(INT4_EMU_RUNTIME(GraphInstantiate)(&instance, graph, nullptr, nullptr, 0), "instantiate");
  bool same = true;
  for (const std::vector<int32_t>& v : {std::vector<int32_t>(8, 1), std::vector<int32_t>{-1, 0, 7, 1, -1, -1, 0, 0}}) {
    must(INT4_EMU_RUNTIME(Memcpy)(ids.get(), v.data(), 32, INT4_EMU_RUNTIME(MemcpyHostToDevice)), "new ids");
    must(INT4_EMU_RUNTIME(GraphLaunch)(instance, stream), "replay");
    const std::vector<uint8_t> replayed = out.host();
    must(gpu::fused_moe(p, workspace.get(), workspace.bytes(), nullptr), "fresh");
    same = same && replayed == out.host();
  }
  expect(same, "graph replay follows ids changed in place");
  must(INT4_EMU_RUNTIME(GraphExecDestroy)(instance), "destroy");
  must(INT4_EMU_RUNTIME(GraphDestroy)(graph), "destroy");
  must(INT4_EMU_RUNTIME(StreamDestroy)(stream), "destroy");

  // Indices that the host cannot check: nothing outside the buffers may be touched (memcheck sees it), whatever comes out.
  const Buffer<int32_t> bad_perm(std::vector<int32_t>(64, 1 << 30));
  MoeProblem bad = p;
  bad.w13.perm = bad_perm.get();
  Buffer<uint8_t> bad_workspace(gpu::moe_workspace_bytes(bad));
  must(gpu::fused_moe(bad, bad_workspace.get(), bad_workspace.bytes(), nullptr), "perm out of range");
  GroupedGemmProblem g;
  Buffer<uint8_t> grouped_out(4 * 64 * 2);
  g.rows = 4, g.x = device_x.get(), g.x_stride = 32, g.dtype = DType::bf16, g.weight = w13.w, g.out = grouped_out.get();
  Buffer<uint8_t> grouped_workspace(gpu::grouped_gemm_workspace_bytes(g));
  for (const std::vector<int64_t>& v :
       {std::vector<int64_t>{0, 4, 0}, std::vector<int64_t>{-5, int64_t{1} << 40, 4}, std::vector<int64_t>{4, 0, 4}}) {
    const Buffer<int64_t> offsets(v);
    must(gpu::grouped_gemm(g, {offsets.get(), true}, grouped_workspace.get(), grouped_workspace.bytes(), nullptr), "bad offsets");
    synchronize();
  }
  expect(grouped_out.guarded() && bad_workspace.guarded() && grouped_workspace.guarded(), "indices out of range stay inside the buffers");
}

}  // namespace selfcheck
