// An accelerator whose memory and arithmetic are the host's, but whose tensors, generators and streams torch takes for a device's.
//
// An operation runs on the CPU on copies of its tensors. It refuses what a GPU refuses: tensors of two devices, and a generator
// of another device. One device, one queue of work: a stream or event is always ready.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : c10::GetCPUAllocator()->raw_allocate(bytes);
    return {data, data, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static void release(void* data) {
    if (data != nullptr) {
      c10::GetCPUAllocator()->raw_deallocate(data);
    }
  }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// Streams and events of a device without a queue.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local c10::StreamId current;
  static std::atomic<c10::StreamId> made;

  c10::DeviceType type() const override {
    return KIND;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return DEVICE;
  }
  c10::Device getDevice() const override {
    return DEVICE;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "invalid device ordinal");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, std::exchange(current, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    // Any address that is not null.
    *event = const_cast<c10::Device*>(&DEVICE);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 1.0;
  }
};

thread_local c10::StreamId Guard::current = 0;
std::atomic<c10::StreamId> Guard::made{0};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The numbers are those of a CPU generator with the same seed.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<DeviceGenerator>();
  return generator;
}

// Page-locked memory of the host is memory whose address is noted.
struct PinnedMemory final : c10::Allocator {
  static std::mutex& lock() {
    static std::mutex mutex;
    return mutex;
  }
  static std::set<std::pair<const char*, size_t>>& blocks() {
    static std::set<std::pair<const char*, size_t>> all;
    return all;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> hold(lock());
    blocks().emplace(static_cast<const char*>(data), std::max<size_t>(bytes, 1));
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> hold(lock());
      blocks().erase(blocks().lower_bound({static_cast<const char*>(data), 0}));
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  static bool holds(const void* data) {
    const auto* address = static_cast<const char*>(data);
    std::lock_guard<std::mutex> hold(lock());
    auto next = blocks().upper_bound({address, SIZE_MAX});
    return next != blocks().begin() && address < std::prev(next)->first + std::prev(next)->second;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index == 0, "invalid device ordinal");
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory pinned;
    return &pinned;
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedMemory::holds(data);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return DEVICE;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto grown = memory.allocate(bytes);
    if (bytes != 0 && storage.data() != nullptr) {
      std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) {
    return tensor;
  }
  auto storage = tensor.storage();
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([storage](void*) {})
      .options(tensor.options().device(c10::DeviceType::CPU).requires_grad(false))
      .target_device(c10::DeviceType::CPU)
      .make_tensor();
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::native::resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const auto bytes = static_cast<int64_t>(self.storage().nbytes());
  const int64_t needed = (c10::multiply_integers(size) + self.storage_offset()) * static_cast<int64_t>(self.itemsize());
  if (needed > bytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

void record_stream(at::Tensor&, c10::Stream) {}

at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  const auto host_bias = bias.has_value() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return at::convolution(
             on_host(x), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(DEVICE);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  auto [x_grad, weight_grad, bias_grad] = at::convolution_backward(
      on_host(grad), on_host(x), on_host(weight), {weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)}, stride,
      padding, dilation, transposed, output_padding, groups, mask);
  const auto back = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(DEVICE) : tensor; };
  return {back(x_grad), back(weight_grad), back(bias_grad)};
}

// The running statistics change, which the schema does not say: the fallback would change a copy.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
  for (const auto& other : {weight, bias, mean, variance}) {
    TORCH_CHECK(
        !other.has_value() || !other->defined() || other->is_privateuseone(),
        "Expected all tensors to be on the same device, but found at least two devices, ", DEVICE, " and cpu!");
  }
  const auto alias = [](const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? std::optional<at::Tensor>(on_host(*tensor)) : std::nullopt;
  };
  auto [out, saved_mean, saved_scale] = at::native_batch_norm(
      on_host(x), alias(weight), alias(bias), alias(mean), alias(variance), training, momentum, eps);
  return {out.to(DEVICE), saved_mean.to(DEVICE), saved_scale.to(DEVICE)};
}

// A GPU takes these tensors of the host beside its own: scalars, and the indices of an indexing operation.
bool may_mix(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::index_put" || name == "aten::copy_" || name == "aten::_to_copy";
}

void check_device(const c10::OperatorHandle& op, const at::Tensor& tensor, bool& host, bool& device) {
  if (!tensor.defined() || tensor.device().type() == c10::DeviceType::Meta) {
    return;
  }
  device |= tensor.is_privateuseone();
  host |= tensor.is_cpu() && tensor.dim() > 0;
  TORCH_CHECK(
      !(host && device) || may_mix(op),
      "Expected all tensors to be on the same device, but found at least two devices, ", DEVICE, " and cpu! (", op.schema().name(),
      ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  bool host = false, device = false;
  std::optional<at::Generator> ours, theirs;
  for (const auto index : c10::irange(arguments.size())) {
    auto& value = (*stack)[begin + index];
    if (value.isTensor()) {
      check_device(op, value.toTensor(), host, device);
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) {
        check_device(op, tensor, host, device);
      }
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor.has_value()) {
          check_device(op, *tensor, host, device);
        }
      }
    }
    const auto& type = arguments[index].type();
    const bool takes_generator = type->kind() == c10::TypeKind::GeneratorType ||
        (type->kind() == c10::TypeKind::OptionalType &&
         type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (takes_generator) {
      ours = value.isNone() ? default_generator() : value.toGenerator();
      TORCH_CHECK(
          ours->device().type() == KIND, "Expected a '", KIND, "' device type for generator but found '", ours->device().type(),
          "'");
      theirs = at::detail::createCPUGenerator();
      theirs->set_state(at::Tensor(ours->get<at::CPUGeneratorImpl>()->get_state()));
      value = *theirs;
    }
  }
  at::native::cpu_fallback(op, stack);
  if (theirs.has_value()) {
    ours->set_state(at::Tensor(theirs->get<at::CPUGeneratorImpl>()->get_state()));
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });
  m.impl("set_", [](at::Tensor& self) -> at::Tensor& {
    return set_storage(self, empty({0}, {}, {}, {}, {}, {}).storage(), 0, {0}, {1});
  });
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(simulated_accelerator, m) {
  m.def("default_generator() -> Generator?", []() -> std::optional<at::Generator> { return default_generator(); });
}
