// A GPU without a GPU: PyTorch's device "cuda" with the memory of the host, for a build of PyTorch without CUDA, whose
// kernels for this device are absent. For PyTorch its tensors are on a GPU: operators refuse operands of two devices,
// tracing takes PyTorch's branches for CUDA, autograd runs a backward pass in a thread of the device, and only a copy
// brings values to the CPU. PyTorch's own operators run on copies of their operands; those that make memory or views are
// below. The library must be loaded before PyTorch, which asks for the hooks of CUDA once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>

namespace {

constexpr auto KIND = c10::DeviceType::CUDA;

// ---- two devices, each with one stream, on which all work is done when it is given ----

struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  static thread_local c10::DeviceIndex current;

  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before(KIND, current);
    current = d.index();
    return before;
  }
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, s.device());
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &current; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};
thread_local c10::DeviceIndex Guard::current = 0;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- memory ----

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = bytes ? std::aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
    return {p, p, &std::free, c10::Device(KIND, Guard::current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex current_device() const override { return Guard::current; }
  int getNumGPUs() const override { return 2; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, 0}; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator(0);
    return generator;
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

c10::Device placed(std::optional<c10::Device> d) {
  return d && d->has_index() ? *d : c10::Device(KIND, Guard::current);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// ---- copies: the same memory, seen as a tensor of the CPU ----

at::Tensor on_cpu(const at::Tensor& t) {
  if (!t.is_cuda()) return t;
  auto s = t.storage();
  c10::DataPtr data(s.mutable_data(), new c10::Storage(s), [](void* p) { delete static_cast<c10::Storage*>(p); },
                    c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(data), nullptr, false);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       t.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& copy_into(at::Tensor& to, const at::Tensor& from, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Scalar item(const at::Tensor& t) { return on_cpu(t).item(); }

// ---- views ----

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(t, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& t, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::cpu::set_(t, s, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& t, at::Storage s) { return at::cpu::set_(t, s); }

void on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_into);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_copy_from_and_resize", copy_from_and_resize); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_copies>()); }

}  // namespace
