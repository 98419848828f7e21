// The Python module memeff_attn._C: the only file that knows Python. Its calls are described in memeff_attn/_C.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <sstream>
#include <utility>

#include "call.h"
#include "device.h"

namespace py = pybind11;

namespace memeff {
namespace {

// The exchange table of a tensor type; the last type seen is kept, for ever, so that its address stays its own.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static const dlpack::ExchangeApi* known_api = nullptr;
  if (type == known_type) return known_api;
  const py::object capsule = py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none())
    throw py::type_error("no __dlpack_c_exchange_api__: the calls named _scalars take such tensors");
  auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->version.major != 1) api = api->previous;
  if (api == nullptr || api->tensor_from_py_object == nullptr)
    throw py::type_error("this torch's DLPack exchange is not of version 1: the calls named _scalars take its tensors");
  Py_INCREF(type);
  known_type = type;
  return known_api = api;
}

TensorDesc desc_of(py::handle tensor) {
  if (tensor.is_none()) return {};
  dlpack::Tensor view;
  if (exchange_api(Py_TYPE(tensor.ptr()))->tensor_from_py_object(tensor.ptr(), &view) != 0)
    throw py::error_already_set();
  return from_dlpack(view);
}

// (address, DType, shape, strides)
TensorDesc desc_of_scalars(py::handle scalars, int device) {
  if (scalars.is_none()) return {};
  const auto [address, dtype, shape, strides] =
      scalars.cast<std::tuple<uintptr_t, int32_t, std::vector<int64_t>, std::vector<int64_t>>>();
  if (shape.size() != strides.size()) throw py::value_error("shape and strides have different lengths");
  TensorDesc desc;
  desc.data = reinterpret_cast<void*>(address);
  desc.dtype = dtype;
  desc.device_type = device >= 0 ? kCudaDevice : 1;
  desc.device = device;
  desc.rank = shape.empty() ? kMaxRank + 1 : int32_t(shape.size());
  for (size_t i = 0; i < shape.size() && i < kMaxRank; ++i) desc.shape[i] = shape[i], desc.strides[i] = strides[i];
  return desc;
}

// None, or (window_left, window_right, query_starts, key_starts, key_lengths, block_tables, page_size,
// bias_per_sequence); `describe` turns each of the tensors into a TensorDesc.
template <typename Describe>
MaskCall mask_of(py::handle mask, const Describe& describe) {
  if (mask.is_none()) return {};
  const auto fields = mask.cast<py::tuple>();
  if (fields.size() != 8) throw py::value_error("mask has " + std::to_string(fields.size()) + " fields, not 8");
  return {fields[0].cast<int64_t>(), fields[1].cast<int64_t>(), describe(fields[2]),       describe(fields[3]),
          describe(fields[4]),       describe(fields[5]),       fields[6].cast<int64_t>(), fields[7].cast<bool>()};
}

MaskCall mask_of_tensors(py::handle mask) { return mask_of(mask, desc_of); }

MaskCall mask_of_scalars(py::handle mask, int device) {
  return mask_of(mask, [&](py::handle scalars) { return desc_of_scalars(scalars, device); });
}

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

// forward takes tensors, forward_scalars takes what describes them; ForwardCall starts with as many as I counts.
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
  m.def("forward_scalars", [](Handle<I>... scalars, float scale, double p, int causal, bool tf32, std::string variant,
                              py::handle mask, uintptr_t stream, int device) {
    const ForwardCall args{desc_of_scalars(scalars, device)..., scale, p, causal, tf32, std::move(variant),
                           mask_of_scalars(mask, device)};
    return answer(run_forward(args, {}, stream_of(stream)));
  });
}

// The same of BackwardCall; `allocate` gives the workspace in the same form as the tensors.
template <size_t... I>
void def_backward(py::module_& m, std::index_sequence<I...>) {
  m.def("backward", [](Handle<I>... tensors, py::handle allocate, float scale, double p, int causal, bool tf32,
                       std::string variant, py::handle mask, uintptr_t stream) {
    py::object workspace;  // alive until the launches are made
    const auto place = [&](int64_t elements) { return desc_of(workspace = allocate(elements)); };
    const BackwardCall args{desc_of(tensors)..., scale, p, causal, tf32, std::move(variant), mask_of_tensors(mask)};
    return answer(run_backward(args, place, stream_of(stream)));
  });
  m.def("backward_scalars", [](Handle<I>... scalars, py::handle allocate, float scale, double p, int causal, bool tf32,
                               std::string variant, py::handle mask, uintptr_t stream, int device) {
    const auto place = [&](int64_t elements) { return desc_of_scalars(allocate(elements), device); };
    const BackwardCall args{desc_of_scalars(scalars, device)..., scale, p, causal, tf32, std::move(variant),
                            mask_of_scalars(mask, device)};
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

Request request_of(const py::dict& fields) {
  Request r;
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    if (name == "dtype")
      r.dtype = dtype_from(value.cast<std::string>());
    else if (name == "math")
      r.math = value.cast<std::string>() == "tf32" ? Math::kTf32 : Math::kIeee;
    else if (name == "variant")
      r.variant = value.is_none() ? "" : value.cast<std::string>();
    else if (name == "pass")
      r.pass = pass_from(value.cast<std::string>());
    else if (name == "dropout")
      r.dropout = value.cast<bool>();
    else if (name == "bias_grad")
      r.bias_grad = value.cast<bool>();
    else if (name == "has_bias")
      r.has_bias = value.cast<bool>();
    else if (name == "any_build")
      r.any_build = value.cast<bool>();
    else if (name == "sm")
      r.sm = value.cast<int32_t>();
    else if (name == "smem_optin")
      r.smem_optin = value.cast<int32_t>();
    else if (name == "sm_count")
      r.sm_count = value.cast<int32_t>();
    else if (name == "B")
      r.batch = value.cast<int64_t>();
    else if (name == "M")
      r.queries = value.cast<int64_t>();
    else if (name == "N")
      r.keys = value.cast<int64_t>();
    else if (name == "H")
      r.heads = value.cast<int64_t>();
    else if (name == "K")
      r.head_dim = value.cast<int32_t>();
    else if (name == "Kv")
      r.value_dim = value.cast<int32_t>();
    else if (name == "alignment")
      r.alignment = value.cast<int32_t>();
    else
      throw py::key_error("a request has no field \"" + name + "\"");
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
  return py::dict("name"_a = row.name, "family"_a = row.family, "arch"_a = row.arch, "kind"_a = pass_name(row.kind),
                  "dtype"_a = dtype_name(row.dtype), "math"_a = row.math == Math::kTf32 ? "tf32" : "ieee",
                  "max_k"_a = row.max_k, "max_kv"_a = row.max_kv, "alignment"_a = row.alignment, "bias"_a = row.bias,
                  "dropout"_a = row.dropout, "tile_m"_a = row.tile_m, "tile_n"_a = row.tile_n,
                  "value_tile"_a = row.value_tile, "threads"_a = row.threads, "smem_bytes"_a = row.smem_bytes,
                  "max_m"_a = row.max_m, "max_blocks_per_sm"_a = row.max_blocks_per_sm, "min_sm"_a = row.min_sm,
                  "max_sm"_a = row.max_sm, "allow_spill"_a = row.allow_spill, "blocks_per_sm"_a = row.blocks_per_sm,
                  "built_archs"_a = archs, "built"_a = row.is_built());
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
  m.def("select", &select_name);
  m.def("explain", [](const py::dict& request) { return explain(request_of(request)); });
  m.def("variants", &variants);
  m.def("built_archs", &built_archs);
  m.def("cuda_version", [] { return kBuildInfo.cuda_version; });
  m.def("device_info", &device_info);
  m.attr("source_hash") = kBuildInfo.source_hash;
  m.attr("is_cuda_build") = !is_host_only();
}

}  // namespace memeff
