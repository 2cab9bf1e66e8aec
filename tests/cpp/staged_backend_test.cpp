#include "lmswap/lanes/staged_backend.h"

#include <gtest/gtest.h>

#include "lmswap/tiers/direct_file.h"
#include "test_device.h"

namespace lmswap::test::staged_backend_test {
namespace {

// Two bounce buffers for many requests, on a device that is late: each buffer is wanted again while it is still in use.
TEST(StagedBackend, uses_a_bounce_buffer_again_only_when_device_and_disk_are_done_with_it) {
  constexpr uint64_t kBytes = 9 * kRequestBytes + 5;
  const TestDirectory directory;
  const auto device = make_test_device("emulated", "write@*=jitter:0.01,read@*=jitter:0.001", 0.02);
  const auto bytes = make_bytes(kBytes, 1);
  const uint64_t source = device->allocate(kBytes), target = device->allocate(kBytes);
  device->upload(source, bytes);
  const Block block{std::make_shared<DirectFile>(directory.path(), round_to_pages(kBytes), device->faults), 0, kBytes};
  {
    IoPool pool(2);
    StagedBackend backend(device->driver, pool, 2, BandwidthLimiter());
    for (const auto& [direction, pointer] : {std::pair(Direction::kOut, source), std::pair(Direction::kIn, target)}) {
      const auto transfer = std::make_shared<Transfer>(device->driver, direction, 1, 1, pointer, block);
      transfer->ready.record(device->stream);
      backend.move(transfer);
      if (transfer->state.finish_part()) backend.complete(transfer);
      EXPECT_TRUE(transfer->state.wait_landed());
      Event arrival(device->driver);
      transfer->state.make_wait(device->stream, arrival);
    }
    EXPECT_EQ(device->download(target, kBytes), bytes);
    backend.drain();
  }
  for (const uint64_t pointer : {source, target}) device->free(pointer);
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

}  // namespace
}  // namespace lmswap::test::staged_backend_test
