// Host copies: blocks that the caller accesses in place; on each driver and tier that has them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/engine.h"
#include "test_device.h"

namespace lmswap::test::host_copy_test {
namespace {

constexpr uint64_t kPage = kPageBytes, kMiB = 1 << 20, kBytes = 3 * kMiB + 777, kLimit = 64 * kMiB;

// Owner of a host copy, as a tensor of torch is.
class Copy {
 public:
  explicit Copy(const HostCopy& copy)
      : handle_(copy.handle), tensor_(copy.bytes, [](DLManagedTensor* self) { self->deleter(self); }) {}
  int64_t handle() const { return handle_; }
  const DLTensor& tensor() const { return tensor_->dl_tensor; }
  std::byte* data() const { return static_cast<std::byte*>(tensor().data); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data()); }
  uint64_t nbytes() const { return static_cast<uint64_t>(tensor().shape[0]); }
  test::Bytes bytes() const { return {data(), data() + nbytes()}; }
  void write(const test::Bytes& bytes) const { std::memcpy(data(), bytes.data(), bytes.size()); }

 private:
  int64_t handle_;
  std::unique_ptr<DLManagedTensor, void (*)(DLManagedTensor*)> tensor_;
};

// Counts the events that exist and the waits for the device, and notes whether memory is clean when it is given back.
class CountingDriver final : public test::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;

  EventHandle create_event() override {
    ++num_events;
    return ForwardingDriver::create_event();
  }
  void destroy_event(EventHandle event) noexcept override {
    --num_events;
    ForwardingDriver::destroy_event(event);
  }
  void* allocate_host(uint64_t nbytes, uint64_t max_bytes) override {
    void* pointer = ForwardingDriver::allocate_host(nbytes, max_bytes);
    const std::lock_guard lock(mutex_);
    sizes_[pointer] = nbytes;
    return pointer;
  }
  void* allocate_addressable(uint64_t nbytes) override {
    void* pointer = ForwardingDriver::allocate_addressable(nbytes);
    const std::lock_guard lock(mutex_);
    sizes_[pointer] = nbytes;
    return pointer;
  }
  void synchronize_device() noexcept override {
    ++num_waits;
    if (during_wait) during_wait();
    ForwardingDriver::synchronize_device();
  }
  void free_host(void* pointer) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      const test::Bytes zeros(sizes_[pointer]);
      freed.push_back(std::memcmp(pointer, zeros.data(), zeros.size()) == 0);
    }
    ForwardingDriver::free_host(pointer);
  }

  std::atomic<int> num_events = 0, num_waits = 0;
  std::function<void()> during_wait;
  std::vector<bool> freed;  // whether each was clean

 private:
  std::mutex mutex_;
  std::map<void*, uint64_t> sizes_;
};

struct Setup {
  std::string device, tier;
  bool is_paced;  // where the device cannot wait for the link, a lane then has a thread
};

std::vector<Setup> setups() {
  std::vector<Setup> setups = {
      {"host", "disk", false}, {"emulated_one_queue", "host", false}, {"emulated_one_queue", "host", true}};
  for (const std::string& device : test::test_device_kinds()) setups.push_back({device, "host", false});
  return setups;
}

class HostCopies : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override { open(); }

  void TearDown() override {
    close();
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  }

  // A fresh device and engine.
  void open(const std::string& faults = "", SafetyOptions options = {}) {
    close();
    device_.reset();
    device_ = make_test_device(GetParam().device, faults);
    driver_ = std::make_shared<CountingDriver>(device_->driver);
    const double rate = GetParam().is_paced ? 1e9 : 0;
    engine_ = Engine::open(driver_, device_->faults, BandwidthLimiters{BandwidthLimiter(rate), BandwidthLimiter(rate)},
                           options);
    open_tier(*engine_, tier(), kLimit, directory_.path());
  }
  void close() {
    if (!engine_) return;
    engine_->close();
    engine_.reset();
    driver_.reset();
    for (const uint64_t pointer : allocated_) device_->free(pointer);
    allocated_.clear();
  }

  std::string tier() const { return GetParam().tier; }
  uint64_t allocate(uint64_t nbytes) { return allocated_.emplace_back(device_->allocate(nbytes)); }

  std::vector<Copy> make(const std::vector<uint64_t>& sizes) {
    std::vector<Copy> copies;
    for (const HostCopy& copy : engine_->make_host_copies(tier(), sizes)) copies.emplace_back(copy);
    return copies;
  }
  Arrival in(const Copy& copy, uint64_t pointer, StreamHandle stream) {
    return {copy.handle(), engine_->in_start(2, copy.handle(), pointer, copy.nbytes(), stream)};
  }
  Arrival in(const Copy& copy, uint64_t pointer) { return in(copy, pointer, device_->stream); }
  Arrival fill(const Copy& copy, uint64_t pointer, StreamHandle stream) {
    return {copy.handle(), engine_->fill_host_copy(1, copy.handle(), pointer, stream)};
  }
  Arrival fill(const Copy& copy, uint64_t pointer) { return fill(copy, pointer, device_->stream); }
  void done(const Arrival& arrival) {
    engine_->in_done(arrival.handle, arrival.transfer, device_->stream);
    engine_->confirm();
  }
  // Until the caller itself may access the bytes in place.
  void finish(const Arrival& arrival) {
    done(arrival);
    device_->driver->synchronize_stream(device_->stream);
  }
  TierStats stats() { return engine_->tier_stats(tier()); }

  // A descriptor of our own of the slab's file, which has no name: found by its size; negative if there is none.
  static int find_file(uint64_t nbytes) {
    for (int i = 3; i < 256; ++i) {
      if (lseek(i, 0, SEEK_END) == static_cast<off_t>(nbytes)) return dup(i);
    }
    return -1;
  }

  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<CountingDriver> driver_;
  std::shared_ptr<Engine> engine_;
  std::vector<uint64_t> allocated_;
};

TEST_P(HostCopies, are_tensors_of_the_device_in_a_slab_as_large_as_they_are) {
  const auto copies = make({1, kPage, kPage + 1, kBytes});
  const int32_t type = GetParam().device == "host" ? 1 : 2;
  std::set<int64_t> handles;
  for (const Copy& copy : copies) {
    EXPECT_EQ(copy.tensor().device.device_type, type);
    EXPECT_EQ(copy.tensor().device.device_id, 0);
    EXPECT_EQ(copy.tensor().ndim, 1);
    EXPECT_EQ(copy.tensor().dtype.code, 1);
    EXPECT_EQ(copy.tensor().dtype.bits, 8);
    EXPECT_EQ(copy.tensor().byte_offset, 0U);
    EXPECT_EQ(engine_->nbytes(copy.handle()), copy.nbytes());
    handles.insert(copy.handle());
  }
  EXPECT_EQ(handles.size(), 4U);
  EXPECT_EQ(copies[0].address() % kPage, 0U);
  EXPECT_EQ(copies[1].data(), copies[0].data() + kPage);
  EXPECT_EQ(copies[2].data(), copies[1].data() + kPage);
  EXPECT_EQ(copies[3].data(), copies[2].data() + 2 * kPage);
  EXPECT_EQ(copies[3].nbytes(), kBytes);
  EXPECT_EQ(stats().capacity_bytes, 4 * kPage + round_to_pages(kBytes));
  EXPECT_EQ(stats().used_bytes, stats().capacity_bytes);
  EXPECT_EQ(engine_->live_handles(), 4U);
}

TEST_P(HostCopies, bytes_written_in_place_arrive) {
  const auto copies = make({kBytes, 100});
  const uint64_t target = allocate(kBytes);
  for (uint64_t seed = 1; seed < 4; ++seed) {
    for (const Copy& copy : copies) {
      copy.write(make_bytes(copy.nbytes(), seed));
      finish(in(copy, target));
      EXPECT_EQ(device_->download(target, copy.nbytes()), make_bytes(copy.nbytes(), seed));
    }
  }
}

TEST_P(HostCopies, kernels_access_them_in_place) {
  const auto copies = make({kBytes});
  const uint64_t pointer = allocate(kBytes);
  device_->fill(copies[0].address(), kBytes, std::byte{7});  // slow: the copy in begins late
  finish(in(copies[0], pointer));
  EXPECT_EQ(device_->download(pointer, kBytes), test::Bytes(kBytes, std::byte{7}));
}

TEST_P(HostCopies, are_given_back_when_the_kernels_that_access_them_have_ended) {
  auto copies = make({kBytes, kPage});
  device_->fill(copies[1].address(), kPage, std::byte{7});
  device_->fill(copies[0].address(), kBytes, std::byte{7});
  std::thread([&] { copies.clear(); }).join();
  EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  EXPECT_EQ(stats().capacity_bytes, 0U);
}

TEST_P(HostCopies, leave_the_engine_to_others_while_they_wait_for_kernels) {
  auto copies = make({kPage, kPage});
  std::future<uint64_t> asked;
  driver_->during_wait = [&] {
    asked = std::async(std::launch::async, [&] { return engine_->live_handles(); });
    EXPECT_EQ(asked.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  };
  const uint64_t target = allocate(kPage);
  in(copies[0], target);
  copies.clear();
  driver_->during_wait = nullptr;
  EXPECT_EQ(driver_->num_waits, tier() == "disk" ? 0 : 2);
}

TEST_P(HostCopies, alone_wait_for_the_device) {
  const uint64_t pointer = allocate(kPage);
  for (int step = 0; step < 3; ++step) {
    const Token token(engine_->out_start(1, tier(), 0, pointer, kPage, device_->stream));
    engine_->out_done(token.handle(), device_->stream);
  }
  engine_->reserve(tier(), kPage, true);
  engine_->close();
  EXPECT_EQ(driver_->num_waits, 0);
}

TEST_P(HostCopies, can_be_filled_read_in_place_and_copied_in) {
  const auto copies = make({kPage, kBytes});
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  copies[0].write(make_bytes(kPage, 9));
  for (uint64_t seed = 1; seed < 4; ++seed) {
    device_->upload(pointer, make_bytes(kBytes, seed));
    finish(fill(copies[1], pointer));
    EXPECT_EQ(copies[1].bytes(), make_bytes(kBytes, seed));
    done(in(copies[1], target));
    EXPECT_EQ(device_->download(target, kBytes), make_bytes(kBytes, seed));
  }
  EXPECT_EQ(copies[0].bytes(), make_bytes(kPage, 9));
}

TEST_P(HostCopies, a_copy_in_waits_for_the_last_of_the_fills_before_it) {
  const auto copies = make({kBytes});
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  const StreamHandle other = device_->make_stream();
  device_->upload(pointer, make_bytes(kBytes, 1));
  done(fill(copies[0], pointer, other));
  device_->fill(pointer, kBytes, std::byte{0x77});  // slow: the fill begins late
  fill(copies[0], pointer);
  const Arrival filled = fill(copies[0], pointer), arrival = in(copies[0], target, other);
  finish(arrival);
  EXPECT_EQ(device_->download(target, kBytes), test::Bytes(kBytes, std::byte{0x77}));
  done(filled);
}

TEST_P(HostCopies, a_fill_waits_for_copies_in_that_still_read) {
  const auto copies = make({kBytes});
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  const StreamHandle other = device_->make_stream();
  copies[0].write(make_bytes(kBytes, 1));
  device_->upload(pointer, make_bytes(kBytes, 2));
  device_->fill(target, kBytes, std::byte{0});  // slow: the copy in begins late
  const Arrival arrival = in(copies[0], target), filled = fill(copies[0], pointer, other);
  finish(filled);
  EXPECT_EQ(copies[0].bytes(), make_bytes(kBytes, 2));
  done(arrival);
  EXPECT_EQ(device_->download(target, kBytes), make_bytes(kBytes, 1));
}

TEST_P(HostCopies, a_thousand_copies_leave_nothing_behind) {
  constexpr int kSteps = 1000, kFewEvents = 32;
  const auto copies = make({kPage});
  const uint64_t target = allocate(kPage);
  size_t num_records = 0;
  const int num_before = driver_->num_events;
  int num_most = 0;
  for (int step = 0; step < kSteps; ++step) {
    finish(step % 10 == 0 ? fill(copies[0], target) : in(copies[0], target));
    for (const TransferRecord& record : engine_->take_records()) {
      EXPECT_EQ(record.is_in, record.swap == 2);
      EXPECT_EQ(record.nbytes, kPage);
      ++num_records;
    }
    num_most = std::max(num_most, driver_->num_events - num_before);
  }
  EXPECT_LE(num_most, kFewEvents);
  while (num_records < kSteps) num_records += engine_->take_records().size();
  EXPECT_EQ(num_records, static_cast<size_t>(kSteps));
}

TEST_P(HostCopies, outlive_the_engine_that_is_closed) {
  auto copies = make({kBytes, kPage});
  const uint64_t target = allocate(kBytes);
  copies[0].write(make_bytes(kBytes, 1));
  in(copies[0], target);
  const std::weak_ptr<Engine> watched = engine_;
  engine_->close();
  EXPECT_EQ(engine_->live_handles(), 0U);
  EXPECT_EQ(device_->download(target, kBytes), make_bytes(kBytes, 1));
  EXPECT_EQ(copies[0].bytes(), make_bytes(kBytes, 1));
  copies[0].write(make_bytes(kBytes, 2));
  EXPECT_EQ(copies[0].bytes(), make_bytes(kBytes, 2));
  EXPECT_ERROR(in(copies[0], target), OptionError, "closed");
  EXPECT_ERROR(make({1}), OptionError, "closed");
  std::thread([&] { copies.clear(); }).join();
  const std::weak_ptr<Driver> driver = driver_;
  close();
  EXPECT_TRUE(watched.expired());
  EXPECT_TRUE(driver.expired());
}

TEST_P(HostCopies, share_no_slab_with_others_and_free_it_with_the_last) {
  auto copies = make({4 * kPage, kBytes});
  const uint64_t own_bytes = stats().capacity_bytes, pointer = allocate(kBytes);
  copies.erase(copies.begin());
  EXPECT_EQ(stats().capacity_bytes, own_bytes);
  EXPECT_EQ(stats().used_bytes, round_to_pages(kBytes));
  Token token(engine_->out_start(1, tier(), 0, pointer, 4 * kPage, device_->stream));
  engine_->out_done(token.handle(), device_->stream);
  EXPECT_GE(stats().capacity_bytes, own_bytes + 4 * kPage) << "its room was given to another";
  const uint64_t all_bytes = stats().capacity_bytes;
  in(copies[0], pointer);  // still running when the block is released
  copies.clear();
  EXPECT_EQ(stats().capacity_bytes, all_bytes - own_bytes);
  token.reset();
  engine_->reserve(tier(), 2 * kPage);
  EXPECT_EQ(stats().used_bytes, 0U);
  EXPECT_EQ(engine_->live_handles(), 0U);
}

TEST_P(HostCopies, that_the_limit_or_the_system_forbids_leave_nothing) {
  if (GetParam().device != "cuda") open(tier() == "disk" ? "reserve@1=fail" : "allocate_host@1=fail");
  const auto expect_nothing = [&] {
    EXPECT_EQ(stats().capacity_bytes, 0U);
    EXPECT_EQ(stats().used_bytes, 0U);
    EXPECT_EQ(engine_->live_handles(), 0U);
  };
  EXPECT_ERROR(make({kLimit, 1}), TierError, "limit");
  EXPECT_ERROR(make({~uint64_t{0} - 2 * kPage, ~uint64_t{0} - 2 * kPage, kPage}), TierError, "limit");
  expect_nothing();
  if (GetParam().device != "cuda") {
    EXPECT_ERROR(make({kPage, kPage}), TierError, tier() == "disk" ? "No space left" : "of pinned memory");
    expect_nothing();
  }
  const auto copies = make({kLimit - kPage, kPage});
  EXPECT_EQ(stats().capacity_bytes, kLimit);
  EXPECT_ERROR(make({1}), TierError, "limit");
}

TEST_P(HostCopies, are_freed_in_a_forked_child_without_harm) {
  auto copies = make({kBytes, 2 * kPage});
  const bool is_readable = GetParam().device == "host", is_mapped = tier() == "disk";
  for (const Copy& copy : copies) copy.write(make_bytes(copy.nbytes(), 1));
  const test::Bytes expected = make_bytes(kBytes, 1);
  const pid_t child = fork();
  if (child == 0) {
    const bool is_right = !is_readable || copies[0].bytes() == expected;
    if (is_mapped) copies[1].data()[5] = std::byte{0x42};
    copies.clear();
    engine_.reset();
    _exit(is_right && driver_->num_waits == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(engine_->live_handles(), 2U);
  EXPECT_EQ(copies[1].bytes(), make_bytes(2 * kPage, 1));
  const uint64_t target = allocate(kBytes);
  done(in(copies[0], target));
  EXPECT_EQ(device_->download(target, kBytes), expected);
}

TEST_P(HostCopies, of_a_closed_engine_are_left_to_the_parent_by_a_forked_child) {
  open("", {.wipes = true});
  auto copies = make({kBytes});
  copies[0].write(make_bytes(kBytes, 1));
  engine_->close();
  driver_->freed.clear();
  const pid_t child = fork();
  if (child == 0) {
    copies.clear();
    _exit(driver_->freed.empty() && driver_->num_waits == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(copies[0].bytes(), make_bytes(kBytes, 1));
}

TEST_P(HostCopies, are_freed_although_records_of_their_copies_were_not_taken) {
  auto copies = make({kBytes});
  const uint64_t slab_bytes = stats().capacity_bytes, target = allocate(kBytes);
  for (int i = 0; i < 3; ++i) finish(in(copies[0], target));
  copies.clear();
  if (tier() == "disk") {
    EXPECT_LT(find_file(slab_bytes), 0);
  } else {
    EXPECT_EQ(driver_->freed.size(), 1U);
  }
}

TEST_P(HostCopies, an_error_is_reported_although_other_copies_were_queued_since) {
  if (GetParam().device == "cuda") GTEST_SKIP() << "real CUDA does not fail on demand";
  open(tier() == "disk" ? "read@1=fail" : "copy_in@1=fail");
  const auto copies = make({kPage});
  const uint64_t target = allocate(kPage);
  copies[0].write(make_bytes(kPage, 1));
  const Arrival failed = in(copies[0], target);
  while (!engine_->is_finished(failed.transfer)) std::this_thread::yield();
  const Arrival arrival = in(copies[0], target);
  EXPECT_ERROR(done(failed), TransferError, "fail");
  done(arrival);
  EXPECT_EQ(device_->download(target, kPage), make_bytes(kPage, 1));
  EXPECT_ERROR(done(failed), TransferError, "fail");
  done(in(copies[0], target));
  EXPECT_ERROR(done(failed), OptionError, "is none of handle");
}

TEST_P(HostCopies, a_failed_fill_fails_copies_in_until_that_is_known) {
  if (GetParam().device == "cuda") GTEST_SKIP() << "real CUDA does not fail on demand";
  open(tier() == "disk" ? "write@1=fail" : "copy_out@1=fail");
  const auto copies = make({kPage});
  const uint64_t pointer = allocate(kPage), target = allocate(kPage);
  device_->upload(pointer, make_bytes(kPage, 1));
  const Arrival filled = fill(copies[0], pointer);
  EXPECT_ERROR(done(in(copies[0], target)), TransferError, "never reached the tier");
  EXPECT_ERROR(done(filled), TransferError, "fail");
  copies[0].write(make_bytes(kPage, 2));
  done(in(copies[0], target));
  EXPECT_EQ(device_->download(target, kPage), make_bytes(kPage, 2));
  finish(fill(copies[0], pointer));
  EXPECT_EQ(copies[0].bytes(), make_bytes(kPage, 1));
}

TEST_P(HostCopies, are_not_audited) {
  open("", {.audits = true});
  const auto copies = make({kPage});
  const uint64_t target = allocate(kPage);
  copies[0].write(make_bytes(kPage, 1));
  const Arrival arrival = in(copies[0], target);
  finish(arrival);
  EXPECT_EQ(device_->download(target, kPage), make_bytes(kPage, 1));
  EXPECT_ERROR(engine_->take_checksums(arrival.transfer), OptionError, "not audited");
}

TEST_P(HostCopies, are_wiped_when_they_are_freed_also_by_a_closed_engine) {
  for (const bool is_closed : {false, true}) {
    open("", {.wipes = true});
    auto copies = make({kBytes, kPage});
    const uint64_t slab_bytes = stats().capacity_bytes;
    const int file = tier() == "disk" ? find_file(slab_bytes) : -1;
    for (const Copy& copy : copies) copy.write(make_bytes(copy.nbytes(), 1));
    if (is_closed) engine_->close();
    driver_->freed.clear();
    copies.clear();
    engine_->close();  // waits for what a release has queued
    if (tier() == "disk") {
      test::Bytes bytes(slab_bytes, std::byte{1});
      EXPECT_EQ(pread(file, bytes.data(), slab_bytes, 0), static_cast<ssize_t>(slab_bytes));
      EXPECT_EQ(bytes, test::Bytes(slab_bytes));
      ::close(file);
    } else {
      ASSERT_FALSE(driver_->freed.empty());
      for (const bool was_clean : driver_->freed) EXPECT_TRUE(was_clean);
    }
  }
}

TEST_P(HostCopies, are_wiped_behind_kernels_that_still_write) {
  open("", {.wipes = true});
  auto copies = make({kBytes, kPage});
  device_->fill(copies[1].address(), kPage, std::byte{7});
  const std::byte* const released = copies[1].data();
  copies.pop_back();
  engine_->close();  // waits for what the release has queued
  device_->driver->synchronize_stream(device_->stream);
  EXPECT_EQ(test::Bytes(released, released + kPage), test::Bytes(kPage));
  driver_->freed.clear();
  device_->fill(copies[0].address(), kBytes, std::byte{7});
  copies.clear();
  for (const bool was_clean : driver_->freed) EXPECT_TRUE(was_clean);
}

TEST_P(HostCopies, give_mapped_pages_back_and_keep_their_bytes) {
  const auto resident_bytes = []() -> int64_t {  // of files
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssFile:")) return 1024 * std::stoll(line.substr(8));
    }
    return -1;
  };
  constexpr int64_t kMappedBytes = 32 * kMiB;
  const int64_t before_bytes = resident_bytes();
  for (int round = 0; round < 2; ++round) {  // the thread that trims ends with the last copy
    const auto copies = make({kMappedBytes});
    copies[0].write(make_bytes(kMappedBytes, 1));
    const auto is_trimmed = [&] { return resident_bytes() < before_bytes + kMappedBytes / 2; };
    for (int tries = 0; tier() == "disk" && !is_trimmed() && tries < 10'000; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(tier() != "disk" || is_trimmed());
    EXPECT_EQ(copies[0].bytes(), make_bytes(kMappedBytes, 1));
  }
}

TEST_P(HostCopies, refuse_what_is_only_for_swapped_blocks_and_the_reverse) {
  const auto copies = make({kPage});
  const uint64_t pointer = allocate(kPage);
  const Token token(engine_->out_start(1, tier(), 0, pointer, kPage, device_->stream));
  EXPECT_ERROR(engine_->fill_host_copy(1, token.handle(), pointer, device_->stream), OptionError, "not a host copy");
  EXPECT_ERROR(engine_->out_transfer(copies[0].handle()), OptionError, "is a host copy");
  EXPECT_ERROR(engine_->out_done(copies[0].handle(), device_->stream), OptionError, "is a host copy");
  EXPECT_ERROR(fill(copies[0], 0), OptionError, "pointer");
  EXPECT_ERROR(engine_->in_start(1, copies[0].handle(), pointer, kPage - 1, 0), OptionError, std::to_string(kPage));
  EXPECT_ERROR(make({}), OptionError, "at least one byte");
  EXPECT_ERROR(make({1, 0}), OptionError, "at least one byte");
  EXPECT_ERROR(engine_->make_host_copies("tape", {1}), OptionError, "'tape' is not open");
}

INSTANTIATE_TEST_SUITE_P(Tiers, HostCopies, testing::ValuesIn(setups()), [](const auto& tested) {
  return tested.param.tier + "_on_" + tested.param.device + (tested.param.is_paced ? "_paced" : "");
});

TEST(HostCopiesElsewhere, tiers_that_the_device_cannot_read_in_place_are_refused) {
  const TestDirectory directory;
  for (const auto& [device_kind, tier] : test::tier_setups()) {
    if (tier == "host" || (tier == "disk" && device_kind == "host")) continue;
    const auto device = make_test_device(device_kind);
    const auto engine = Engine::open(device->driver, device->faults, BandwidthLimiters{});
    open_tier(*engine, tier, kLimit, directory.path());
    const std::string advice = device_kind == "host" ? "use tier='disk'" : "use tier='host'";
    EXPECT_ERROR(engine->make_host_copies(tier, {kLimit + 1}), TierError, advice);
    EXPECT_ERROR(engine->make_host_copies(tier, {1}), TierError, "'" + tier + "' keeps no bytes");
    EXPECT_EQ(engine->tier_stats(tier).capacity_bytes, 0U);
    engine->close();
  }
}

// On the emulated GPU, with host memory registered in pieces of four pages.
class HostCopiesOnGpu : public testing::Test {
 protected:
  void SetUp() override { engine_->open_host_tier(kLimit); }
  void TearDown() override {
    engine_->close();
    EXPECT_EQ(gpu_.held().pinned_bytes, before_bytes_);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }

  static constexpr uint64_t kRegistration = 4 * kPage;
  std::unique_ptr<TestDevice> device_ = make_test_device("emulated");
  emulated_gpu::System& gpu_ = test::calm_emulated_gpu();
  const size_t before_bytes_ = gpu_.held().pinned_bytes;
  std::shared_ptr<Engine> engine_ =
      Engine::open(open_cuda_driver(LMSWAP_EMULATED_GPU, 0, kRegistration), device_->faults, BandwidthLimiters{});
};

TEST_F(HostCopiesOnGpu, lie_whole_in_one_registration) {
  const std::vector<uint64_t> sizes = {3 * kPage, kPage, 1, 9 * kPage + 5, kPage, 3 * kPage};
  std::vector<Copy> copies;
  for (const HostCopy& copy : engine_->make_host_copies("host", sizes)) copies.emplace_back(copy);
  const auto capacity_bytes = [&] { return engine_->tier_stats("host").capacity_bytes; };
  EXPECT_EQ(capacity_bytes(), 19 * kPage);
  const uint64_t pointer = device_->allocate(10 * kPage), target = device_->allocate(10 * kPage);
  for (const Copy& copy : copies) {
    device_->upload(pointer, make_bytes(copy.nbytes(), 1));
    auto* const stream = reinterpret_cast<void*>(device_->stream);
    const auto copy_whole = [&](void* to, const void* from) {  // as torch does
      return gpu_.copy(to, from, copy.nbytes(), stream, true, emulated_gpu::Pageable::kStaged);
    };
    EXPECT_EQ(copy_whole(copy.data(), reinterpret_cast<void*>(pointer)), 0);
    EXPECT_EQ(copy_whole(reinterpret_cast<void*>(target), copy.data()), 0);
    EXPECT_EQ(device_->download(target, copy.nbytes()), make_bytes(copy.nbytes(), 1));
  }
  std::vector<uint64_t> left_bytes;
  for (; !copies.empty(); copies.erase(copies.begin())) left_bytes.push_back(capacity_bytes() / kPage);
  EXPECT_EQ(left_bytes, (std::vector<uint64_t>{19, 19, 15, 14, 4, 4}));
  EXPECT_EQ(capacity_bytes(), 0U);
  for (const uint64_t allocated : {pointer, target}) device_->free(allocated);
}

TEST_F(HostCopiesOnGpu, leave_no_slab_when_a_later_one_cannot_be_registered) {
  constexpr int kOutOfMemory = 2;
  gpu_.faults.plan("cuMemHostRegister_v2", 3, kOutOfMemory);
  EXPECT_ERROR(engine_->make_host_copies("host", {kRegistration, kRegistration, kRegistration}), TierError,
               "of pinned memory");
  EXPECT_EQ(gpu_.held().pinned_bytes, before_bytes_);
  EXPECT_EQ(engine_->tier_stats("host").capacity_bytes, 0U);
  EXPECT_EQ(engine_->live_handles(), 0U);
}

TEST_F(HostCopiesOnGpu, are_refused_where_the_gpu_has_other_addresses_for_them) {
  gpu_.has_host_addresses = false;
  EXPECT_ERROR(engine_->make_host_copies("host", {kPage, kRegistration}), TierError, "weights=\"keep\"");
  EXPECT_EQ(gpu_.held().pinned_bytes, before_bytes_);
  EXPECT_EQ(engine_->tier_stats("host").capacity_bytes, 0U);
  EXPECT_EQ(engine_->live_handles(), 0U);
}

}  // namespace
}  // namespace lmswap::test::host_copy_test
