// The Python module memeff_attn._C: with binding_tensors.h the only file that knows Python. Its calls are described in
// memeff_attn/_C.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <sstream>
#include <utility>

#include "binding_tensors.h"
#include "call.h"
#include "device.h"

namespace py = pybind11;

namespace memeff {
namespace {

py::object answer(const Status& status) {
  if (status.ok()) return py::none();
  return py::make_tuple(int(status.code), status.message);
}

CUstream_st* stream_of(uintptr_t stream) { return reinterpret_cast<CUstream_st*>(stream); }

template <size_t>
using Handle = py::handle;

// fp32, on the tensor's device, from torch's allocator for the stream that is current there.
py::object new_workspace(py::handle tensor, int64_t elements) {
  using py::literals::operator""_a;
  return tensor.attr("new_empty")(py::make_tuple(elements), "dtype"_a = py::module_::import("torch").attr("float32"));
}

template <typename... Rest>
py::handle query_of(py::handle query, Rest...) {
  return query;
}

// forward takes tensors, forward_scalars takes what describes them, `allocate`'s workspace too; ForwardCall starts with
// as many as I counts.
template <size_t... I>
void def_forward(py::module_& m, std::index_sequence<I...>) {
  m.def("forward", [](Handle<I>... tensors, float scale, double p, int causal, bool tf32, std::string variant,
                      py::handle mask, uintptr_t stream) {
    const ForwardCall args{desc_of(tensors)..., scale, p, causal, tf32, std::move(variant), mask_of_tensors(mask)};
    py::object workspace;  // alive until the launches are made
    const auto place = [&](int64_t elements) {
      return desc_of(workspace = new_workspace(query_of(tensors...), elements));
    };
    return answer(run_forward(args, place, stream_of(stream)));
  });
  m.def("forward_scalars", [](Handle<I>... scalars, py::handle allocate, float scale, double p, int causal, bool tf32,
                              std::string variant, py::handle mask, uintptr_t stream, int device) {
    const auto place = [&](int64_t elements) { return desc_of_scalars(allocate(elements), device); };
    const ForwardCall args{desc_of_scalars(scalars, device)..., scale, p, causal, tf32, std::move(variant),
                           mask_of_scalars(mask, device)};
    return answer(run_forward(args, place, stream_of(stream)));
  });
}

// The same of BackwardCall; `allocate` gives the workspace in the same form as the tensors.
template <size_t... I>
void def_backward(py::module_& m, std::index_sequence<I...>) {
  m.def("backward", [](Handle<I>... tensors, py::handle allocate, bool deterministic, float scale, double p, int causal,
                       bool tf32, std::string variant, py::handle mask, uintptr_t stream) {
    py::object workspace;  // alive until the launches are made
    const auto place = [&](int64_t elements) { return desc_of(workspace = allocate(elements)); };
    const BackwardCall args{desc_of(tensors)...,   scale,        p, causal, tf32, std::move(variant),
                            mask_of_tensors(mask), deterministic};
    return answer(run_backward(args, place, stream_of(stream)));
  });
  m.def("backward_scalars", [](Handle<I>... scalars, py::handle allocate, bool deterministic, float scale, double p,
                               int causal, bool tf32, std::string variant, py::handle mask, uintptr_t stream,
                               int device) {
    const auto place = [&](int64_t elements) { return desc_of_scalars(allocate(elements), device); };
    const BackwardCall args{desc_of_scalars(scalars, device)..., scale,        p, causal, tf32, std::move(variant),
                            mask_of_scalars(mask, device),       deterministic};
    return answer(run_backward(args, place, stream_of(stream)));
  });
}

DType dtype_from(const std::string& name) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32})
    if (name == dtype_name(dtype)) return dtype;
  throw py::value_error("dtype is \"" + name + "\", not \"f16\", \"bf16\" or \"f32\"");
}

Pass pass_from(const std::string& name) {
  for (Pass pass : {Pass::kForward, Pass::kBackward})
    if (name == pass_name(pass)) return pass;
  throw py::value_error("pass is \"" + name + "\", not \"fwd\" or \"bwd\"");
}

using Field = void (*)(Request&, py::handle);
template <auto kMember>
void set(Request& r, py::handle value) {
  r.*kMember = value.cast<std::decay_t<decltype(r.*kMember)>>();
}

const std::map<std::string, Field>& request_fields() {
  static const std::map<std::string, Field> fields{
      {"dtype", [](Request& r, py::handle x) { r.dtype = dtype_from(x.cast<std::string>()); }},
      {"math", [](Request& r, py::handle x) { r.math = x.cast<std::string>() == "tf32" ? Math::kTf32 : Math::kIeee; }},
      {"variant", [](Request& r, py::handle x) { r.variant = x.is_none() ? "" : x.cast<std::string>(); }},
      {"pass", [](Request& r, py::handle x) { r.pass = pass_from(x.cast<std::string>()); }},
      {"dropout", set<&Request::dropout>},
      {"sequences", set<&Request::sequences>},
      {"heads_per_kv", set<&Request::heads_per_kv>},
      {"lse", set<&Request::lse>},
      {"bias_grad", set<&Request::bias_grad>},
      {"deterministic", set<&Request::deterministic>},
      {"has_bias", set<&Request::has_bias>},
      {"causal", set<&Request::causal>},
      {"paged", set<&Request::paged>},
      {"partial", set<&Request::partial>},
      {"bias_alignment", set<&Request::bias_alignment>},
      {"any_build", set<&Request::any_build>},
      {"sm", set<&Request::sm>},
      {"smem_optin", set<&Request::smem_optin>},
      {"sm_count", set<&Request::sm_count>},
      {"B", set<&Request::batch>},
      {"M", set<&Request::queries>},
      {"N", set<&Request::keys>},
      {"H", set<&Request::heads>},
      {"heads_per_key", set<&Request::heads_per_key>},
      {"K", set<&Request::head_dim>},
      {"Kv", set<&Request::value_dim>},
      {"alignment", set<&Request::alignment>}};
  return fields;
}

Request request_of(const py::dict& fields) {
  Request r;
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    const auto found = request_fields().find(name);
    if (found == request_fields().end()) throw py::key_error("a request has no field \"" + name + "\"");
    found->second(r, value);
  }
  return r;
}

std::vector<std::string> built_archs() {
  std::istringstream words{kBuildInfo.archs};
  std::vector<std::string> archs;
  for (std::string word; words >> word;) archs.push_back(word);
  return archs;
}

py::dict row_dict(const KernelRow& row) {
  py::list archs;
  for (int32_t sass : row.sass)
    if (sass != 0) archs.append("sm_" + std::to_string(sass) + (row.arch_specific ? "a" : ""));
  if (row.ptx != 0) archs.append("compute_" + std::to_string(row.ptx));
  using py::literals::operator""_a;
  return py::dict(
      "name"_a = row.name, "family"_a = row.family, "arch"_a = row.arch, "kind"_a = pass_name(row.kind),
      "dtype"_a = dtype_name(row.dtype), "math"_a = row.math == Math::kTf32 ? "tf32" : "ieee", "max_k"_a = row.max_k,
      "max_kv"_a = row.max_kv, "alignment"_a = row.alignment, "bias"_a = row.bias, "dropout"_a = row.dropout,
      "tile_m"_a = row.tile_m, "tile_n"_a = row.tile_n, "value_tile"_a = row.value_tile, "threads"_a = row.threads,
      "smem_bytes"_a = row.smem_bytes, "max_n"_a = row.max_n, "sequences"_a = row.sequences, "max_m"_a = row.max_m,
      "max_blocks_per_sm"_a = row.max_blocks_per_sm, "min_m"_a = row.min_m,
      "min_blocks_per_sm"_a = row.min_blocks_per_sm, "partial"_a = row.partial, "pages"_a = row.pages,
      "bias_alignment"_a = row.bias_alignment, "min_sm"_a = row.min_sm, "max_sm"_a = row.max_sm,
      "allow_spill"_a = row.allow_spill, "blocks_per_sm"_a = row.blocks_per_sm, "in_memory"_a = row.in_memory,
      "adds_query"_a = row.adds_query, "min_length"_a = row.min_length, "causal_length"_a = row.causal_length,
      "min_k"_a = row.min_k, "built_archs"_a = archs, "built"_a = row.is_built());
}

std::string select_name(const py::dict& request) {
  const KernelRow* row = nullptr;
  return select(request_of(request), &row).ok() ? row->name : "";
}

py::dict backward_plan(const py::dict& request, int heads_per_kv, std::array<int64_t, 4> bias) {
  const int64_t sizes[] = {bias[0], bias[1], bias[2], bias[3]};
  const KernelRow* row = nullptr;
  BackwardPlan plan;
  const Status status = plan_request(request_of(request), heads_per_kv, sizes, &row, &plan);
  if (!status.ok()) throw py::value_error(status.message);
  using py::literals::operator""_a;
  return py::dict("row"_a = row->name, "query"_a = plan.splits.query, "key_value"_a = plan.splits.key_value,
                  "bias"_a = plan.splits.bias, "workspace"_a = plan.total);
}

// (row, parts of the keys) of a forward request without sequences.
py::tuple forward_plan(const py::dict& request) {
  const KernelRow* row = nullptr;
  int32_t splits = 1;
  const Status status = plan_forward_request(request_of(request), &row, &splits);
  if (!status.ok()) throw py::value_error(status.message);
  return py::make_tuple(row->name, splits);
}

py::list variants() {
  py::list rows;
  for (int i = 0; i < kKernelCount; ++i) rows.append(row_dict(kKernelTable[i]));
  return rows;
}

py::dict device_info(int device) {
  DeviceFacts facts;
  std::string name;
  Status status = device_facts(device, &facts);
  if (status.ok()) status = device_name(device, &name);
  if (!status.ok()) throw std::runtime_error(status.message);
  using py::literals::operator""_a;
  return py::dict("sm"_a = facts.sm, "smem_optin"_a = facts.smem_optin, "sm_count"_a = facts.sm_count, "name"_a = name);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  def_forward(m, std::make_index_sequence<7>());
  def_backward(m, std::make_index_sequence<13>());
  m.def("backward_plan", &backward_plan);
  m.def("forward_plan", &forward_plan);
  m.def("select", &select_name);
  m.def("explain", [](const py::dict& request) { return explain(request_of(request)); });
  m.def("code_runs", &code_runs);
  m.def("variants", &variants);
  m.def("built_archs", &built_archs);
  m.def("cuda_version", [] { return kBuildInfo.cuda_version; });
  m.def("device_info", &device_info);
  m.attr("source_hash") = kBuildInfo.source_hash;
  m.attr("is_cuda_build") = !is_host_only();
}

}  // namespace memeff
