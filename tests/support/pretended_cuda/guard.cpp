// The device guard of CUDA that a CPU build of torch lacks: it switches nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct Registered {
  Registered() {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(
        new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
  }
} registered;
}  // namespace
