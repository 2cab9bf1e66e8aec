#include "meeting.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <thread>

namespace emulated_gpu {
namespace {

constexpr size_t kDoorBytes = 4096;
constexpr std::chrono::microseconds kLook{20};

void* map_shared(const std::string& name, size_t nbytes) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(nbytes)) != 0)
    throw std::runtime_error("no shared memory: " + name);
  void* begin = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (begin == MAP_FAILED) throw std::runtime_error("no shared memory: " + name);
  return begin;
}

}  // namespace

std::string Meeting::new_name() {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) throw std::runtime_error("no random name");
  char name[40];
  snprintf(name, sizeof name, "/emulated_gpu_%016" PRIx64, random);
  return name;
}

// New shared memory is zero: no process waits, and the door was never opened.
Meeting::Meeting(const std::string& name, int rank, int size)
    : rank(rank), size(size), nbytes_(kDoorBytes + static_cast<size_t>(size) * kPlaceBytes) {
  door_ = static_cast<Door*>(map_shared(name, nbytes_));
  places_ = reinterpret_cast<std::byte*>(door_) + kDoorBytes;
  wait();
  shm_unlink(name.c_str());  // all have it by now
}

Meeting::~Meeting() { munmap(door_, nbytes_); }

bool Meeting::wait() {
  const unsigned opened = door_->num_opened;
  if (++door_->num_waiting == size) {
    door_->num_waiting = 0;
    ++door_->num_opened;
    return true;
  }
  while (door_->num_opened == opened) {
    if (has_left_) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

}  // namespace emulated_gpu
