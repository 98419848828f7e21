// Tensors as Python hands them over. Part of binding.cpp.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "tensor_desc.h"

namespace memeff {
namespace {

namespace py = pybind11;

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

}  // namespace
}  // namespace memeff
