// Exchange between the ranks of a communicator, which are processes, by shared memory: each writes into its slot, waits
// for the others, and reads theirs.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace emulated_gpu {

class Meeting {
 public:
  static constexpr size_t kPlaceBytes = size_t{1} << 18;

  static std::string new_name();

  Meeting(const std::string& name, int rank, int size);  // waits for all ranks
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  std::byte* place(int rank) const { return places_ + static_cast<size_t>(rank) * kPlaceBytes; }
  bool wait();                        // until all ranks are here; false: this one has left
  void leave() { has_left_ = true; }  // who waits here in this process goes on

  const int rank, size;

 private:
  struct Door {
    std::atomic<int> num_waiting;
    std::atomic<unsigned> num_opened;
  };

  size_t nbytes_;
  Door* door_;
  std::byte* places_;
  std::atomic<bool> has_left_{false};
};

}  // namespace emulated_gpu
