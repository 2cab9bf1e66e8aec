// csrc/driver/cuda_abi.h against the toolkit's own cuda.h. Compiling this file is the test.
#include "cuda_abi.h"

#include <cuda.h>

#include <string_view>
#include <type_traits>

namespace {

// Types of the same class and size are passed alike; ours need not have the same names.
template <typename Ours, typename Theirs>
constexpr bool kPassedAlike =
    sizeof(Ours) == sizeof(Theirs) &&
    (std::is_pointer_v<Ours> ? std::is_pointer_v<Theirs> : std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);

template <typename Ours, typename Theirs>
struct CalledAlike : std::false_type {};

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct CalledAlike<OurResult (*)(Ours...), TheirResult (*)(Theirs...)>
    : std::bool_constant<kPassedAlike<OurResult, TheirResult> && (kPassedAlike<Ours, Theirs> && ...)> {};

// cuda.h names a function without its version suffix and maps that to the current one by a macro: ours must be current.
#define LMSWAP_TEXT_OF(name) #name
#define LMSWAP_EXPANDED(name) LMSWAP_TEXT_OF(name)
#define LMSWAP_CHECK(member, symbol, parameters) \
  static_assert(CalledAlike<decltype(lmswap::cuda::Functions::member), decltype(&::symbol)>::value, #symbol);
LMSWAP_CUDA_FUNCTIONS(LMSWAP_CHECK)

static_assert(std::string_view(LMSWAP_EXPANDED(cuDevicePrimaryCtxRelease)) == "cuDevicePrimaryCtxRelease_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuCtxPushCurrent)) == "cuCtxPushCurrent_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuCtxPopCurrent)) == "cuCtxPopCurrent_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuStreamDestroy)) == "cuStreamDestroy_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuEventDestroy)) == "cuEventDestroy_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemcpyDtoHAsync)) == "cuMemcpyDtoHAsync_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemcpyHtoDAsync)) == "cuMemcpyHtoDAsync_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemcpyDtoDAsync)) == "cuMemcpyDtoDAsync_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemHostRegister)) == "cuMemHostRegister_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemHostGetDevicePointer)) == "cuMemHostGetDevicePointer_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuStreamWaitValue64)) == "cuStreamWaitValue64_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemGetInfo)) == "cuMemGetInfo_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemAlloc)) == "cuMemAlloc_v2");
static_assert(std::string_view(LMSWAP_EXPANDED(cuMemFree)) == "cuMemFree_v2");

static_assert(lmswap::cuda::kSuccess == static_cast<int>(CUDA_SUCCESS));
static_assert(lmswap::cuda::kInvalidContext == static_cast<int>(CUDA_ERROR_INVALID_CONTEXT));
static_assert(lmswap::cuda::kInvalidHandle == static_cast<int>(CUDA_ERROR_INVALID_HANDLE));
static_assert(lmswap::cuda::kNotReady == static_cast<int>(CUDA_ERROR_NOT_READY));
static_assert(lmswap::cuda::kPeerAccessAlreadyEnabled == static_cast<int>(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED));
static_assert(lmswap::cuda::kTooManyPeers == static_cast<int>(CUDA_ERROR_TOO_MANY_PEERS));
static_assert(lmswap::cuda::kMemHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(lmswap::cuda::kMemHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(lmswap::cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(lmswap::cuda::kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(lmswap::cuda::kWaitUntilAtLeast == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(lmswap::cuda::kCanWaitForValues == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);

}  // namespace
