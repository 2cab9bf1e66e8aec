// The Python module lmswap.runtime._C; the only file that uses Python. Documented in lmswap/runtime/_C.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "lmswap/engine.h"
#include "lmswap/error.h"
#include "lmswap/float_mode.h"
#include "lmswap/heap/heap.h"
#include "lmswap/heap/interpose.h"
#include "lmswap/lanes/shared_link.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lmswap {
namespace {

using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

void raise(const char* class_name, const Error& error) {
  PyErr_SetString(nb::module_::import_("lmswap.errors").attr(class_name).ptr(), error.what());
}

// Each class becomes that of lmswap.errors with the same name.
void translate_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const BytesDiffer& error) {
    PyErr_SetObject(nb::module_::import_("lmswap.errors").attr("BytesDiffer").ptr(),
                    nb::make_tuple(error.what(), error.swap, error.nbytes, error.offset_bytes).ptr());
  } catch (const OptionError& error) {
    raise("OptionError", error);
  } catch (const TierError& error) {
    raise("TierError", error);
  } catch (const DriverError& error) {
    raise("DriverError", error);
  } catch (const TransferError& error) {
    raise("TransferError", error);
  }
}

// Amounts are passed as signed numbers, so that a negative one is an OptionError instead of a TypeError.
uint64_t checked(const char* name, int64_t amount) {
  if (amount >= 0) return static_cast<uint64_t>(amount);
  throw OptionError(std::string(name) + " is " + std::to_string(amount) + ", must not be negative");
}

// The Python object. Tokens may outlive it; they keep the engine, closed by then, alive.
class PyEngine {
 public:
  PyEngine(const std::string& driver, int device, const std::string& library, double out_bytes_per_second,
           double in_bytes_per_second, const std::string& shared_link, const std::string& faults_text, bool audits,
           bool wipes) {
    if (!(out_bytes_per_second >= 0 && in_bytes_per_second >= 0)) {
      throw OptionError("bytes per second must not be negative");
    }
    auto faults = std::make_shared<Faults>(faults_text);
    BandwidthLimiters limiters =
        shared_link.empty()
            ? BandwidthLimiters{BandwidthLimiter(out_bytes_per_second), BandwidthLimiter(in_bytes_per_second)}
            : open_shared_link(shared_link, out_bytes_per_second, in_bytes_per_second);
    engine_ = Engine::open(open_driver(driver, device, library, faults), faults, std::move(limiters), {audits, wipes});
  }
  ~PyEngine() {
    const nb::gil_scoped_release unlocked;
    engine_->close();
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;
  Engine& get() const { return *engine_; }

 private:
  static std::shared_ptr<Driver> open_driver(const std::string& driver, int device, const std::string& library,
                                             const std::shared_ptr<Faults>& faults) {
    if (driver == "host") return open_host_driver(faults);
    if (driver == "cuda") return open_cuda_driver(library, device);
    throw OptionError("driver is '" + driver + "', must be 'cuda' or 'host'");
  }

  std::shared_ptr<Engine> engine_;
};

// Destructor of the capsule: deletes a tensor that was not consumed, which releases the handle.
void delete_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  tensor->deleter(tensor);
}

using OwnedTensor = std::unique_ptr<DLManagedTensor, void (*)(DLManagedTensor*)>;

OwnedTensor own(DLManagedTensor* tensor) {
  return {tensor, [](DLManagedTensor* unused) { unused->deleter(unused); }};
}

nb::object make_capsule(OwnedTensor tensor) {
  PyObject* capsule = PyCapsule_New(tensor.get(), "dltensor", delete_unused);
  if (capsule == nullptr) throw nb::python_error();
  static_cast<void>(tensor.release());  // the capsule's
  return nb::steal(capsule);
}

nb::object out_start(PyEngine& self, int64_t swap, const std::string& tier, int64_t offset, uint64_t pointer,
                     int64_t nbytes, uint64_t stream) {
  DLManagedTensor* token = nullptr;
  {
    const nb::gil_scoped_release unlocked;
    token = self.get().out_start(swap, tier, checked("offset", offset), pointer, checked("nbytes", nbytes), stream);
  }
  return make_capsule(own(token));
}

nb::list make_host_copies(PyEngine& self, const std::string& tier, const std::vector<int64_t>& sizes) {
  std::vector<std::pair<int64_t, OwnedTensor>> copies;
  {
    const nb::gil_scoped_release unlocked;
    std::vector<uint64_t> checked_sizes;
    for (const int64_t nbytes : sizes) checked_sizes.push_back(checked("size", nbytes));
    copies.reserve(sizes.size());
    for (const auto& [handle, bytes] : self.get().make_host_copies(tier, checked_sizes)) {
      copies.emplace_back(handle, own(bytes));
    }
  }
  nb::list result;
  for (auto& [handle, bytes] : copies) result.append(nb::make_tuple(handle, make_capsule(std::move(bytes))));
  return result;
}

nb::object named_tuple(nb::module_& module, const char* name, const std::vector<std::string>& fields) {
  nb::object made =
      nb::module_::import_("collections").attr("namedtuple")(name, fields, "module"_a = module.attr("__name__"));
  module.attr(name) = made;
  return made;
}

void bind_engine(nb::module_& module) {
  const nb::object record_type = named_tuple(module, "TransferRecord",
                                             {"swap", "is_in", "nbytes", "queued_seconds", "start_seconds",
                                              "end_seconds", "wait_start_seconds", "wait_end_seconds"});
  const nb::object stats_type = named_tuple(
      module, "TierStats",
      {"capacity_bytes", "used_bytes", "peak_used_bytes", "reserve_seconds", "resident_bytes", "peak_resident_bytes"});

  nb::class_<PyEngine>(module, "Engine", nb::is_weak_referenceable())
      .def(nb::init<const std::string&, int, const std::string&, double, double, const std::string&, const std::string&,
                    bool, bool>(),
           nb::kw_only(), "driver"_a, "device"_a = 0, "library"_a = "libcuda.so.1", "out_bytes_per_second"_a = 0.0,
           "in_bytes_per_second"_a = 0.0, "shared_link"_a = "", "faults"_a = "", "audits"_a = false, "wipes"_a = false)
      .def(
          "open_host_tier",
          [](PyEngine& self, int64_t limit) { self.get().open_host_tier(checked("limit_bytes", limit)); },
          "limit_bytes"_a, WithoutGil())
      .def(
          "open_device_tier",
          [](PyEngine& self, int64_t limit) { self.get().open_device_tier(checked("limit_bytes", limit)); },
          "limit_bytes"_a, WithoutGil())
      .def(
          "open_peer_tier",
          [](PyEngine& self, int device, int64_t limit) {
            self.get().open_peer_tier(device, checked("limit_bytes", limit));
          },
          "device"_a, "limit_bytes"_a, WithoutGil())
      .def(
          "open_disk_tier",
          [](PyEngine& self, const std::string& directory, int64_t limit, int io_threads) {
            self.get().open_disk_tier(directory, checked("limit_bytes", limit), io_threads);
          },
          "directory"_a, "limit_bytes"_a, "io_threads"_a = 4, WithoutGil())
      .def(
          "open_compressed_tier",
          [](PyEngine& self, int64_t limit, int io_threads) {
            self.get().open_compressed_tier(checked("limit_bytes", limit), io_threads);
          },
          "limit_bytes"_a, "io_threads"_a = 4, WithoutGil())
      .def(
          "reserve",
          [](PyEngine& self, const std::string& tier, int64_t nbytes, bool replace) {
            self.get().reserve(tier, checked("nbytes", nbytes), replace);
          },
          "tier"_a, "nbytes"_a, "replace"_a = false, WithoutGil())
      .def("out_start", &out_start, "swap"_a, "tier"_a, "offset"_a, "pointer"_a, "nbytes"_a, "stream"_a)
      .def(
          "out_done", [](PyEngine& self, int64_t handle, uint64_t stream) { self.get().out_done(handle, stream); },
          "handle"_a, "stream"_a, WithoutGil())
      .def(
          "in_start",
          [](PyEngine& self, int64_t swap, int64_t handle, uint64_t pointer, int64_t nbytes, uint64_t stream) {
            return self.get().in_start(swap, handle, pointer, checked("nbytes", nbytes), stream);
          },
          "swap"_a, "handle"_a, "pointer"_a, "nbytes"_a, "stream"_a, WithoutGil())
      .def(
          "in_done",
          [](PyEngine& self, int64_t handle, int64_t transfer, uint64_t stream) {
            self.get().in_done(handle, transfer, stream);
          },
          "handle"_a, "transfer"_a, "stream"_a, WithoutGil())
      .def("make_host_copies", &make_host_copies, "tier"_a, "sizes"_a)
      .def(
          "fill_host_copy",
          [](PyEngine& self, int64_t swap, int64_t handle, uint64_t pointer, uint64_t stream) {
            return self.get().fill_host_copy(swap, handle, pointer, stream);
          },
          "swap"_a, "handle"_a, "pointer"_a, "stream"_a, WithoutGil())
      .def(
          "confirm", [](PyEngine& self) { self.get().confirm(); }, WithoutGil())
      .def(
          "forget_unconfirmed", [](PyEngine& self) { self.get().forget_unconfirmed(); }, WithoutGil())
      .def(
          "out_transfer", [](PyEngine& self, int64_t handle) { return self.get().out_transfer(handle); }, "handle"_a,
          WithoutGil())
      .def(
          "nbytes", [](PyEngine& self, int64_t handle) { return self.get().nbytes(handle); }, "handle"_a, WithoutGil())
      .def(
          "is_finished", [](PyEngine& self, int64_t transfer) { return self.get().is_finished(transfer); },
          "transfer"_a, WithoutGil())
      .def(
          "is_idle", [](PyEngine& self) { return self.get().is_idle(); }, WithoutGil())
      .def(
          "take_checksums",
          [](PyEngine& self, int64_t transfer) {
            const std::vector<uint64_t> sums = self.get().take_checksums(transfer);
            return std::vector<int64_t>(sums.begin(), sums.end());
          },
          "transfer"_a, WithoutGil())
      .def("take_records",
           [record_type](PyEngine& self) {
             std::vector<TransferRecord> records;
             {
               const nb::gil_scoped_release unlocked;
               records = self.get().take_records();
             }
             nb::list result;
             for (const TransferRecord& r : records) {
               result.append(record_type(r.swap, r.is_in, r.nbytes, r.queued_seconds, r.start_seconds, r.end_seconds,
                                         r.wait_start_seconds, r.wait_end_seconds));
             }
             return result;
           })
      .def(
          "mark", [](PyEngine& self, uint64_t stream) { return self.get().mark(stream); }, "stream"_a, WithoutGil())
      .def(
          "take_mark", [](PyEngine& self, int64_t mark) { return self.get().take_mark(mark); }, "mark"_a, WithoutGil())
      .def(
          "forget_records", [](PyEngine& self, double stop) { self.get().forget_records(stop); }, "stop_seconds"_a,
          WithoutGil())
      .def(
          "forget_marks", [](PyEngine& self, const std::vector<int64_t>& marks) { self.get().forget_marks(marks); },
          "marks"_a, WithoutGil())
      .def(
          "can_hold", [](PyEngine& self) { return self.get().can_hold(); }, WithoutGil())
      .def(
          "hold", [](PyEngine& self, uint64_t stream, double max_seconds) { self.get().hold(stream, max_seconds); },
          "stream"_a, "max_seconds"_a, WithoutGil())
      .def(
          "let_go", [](PyEngine& self) { self.get().let_go(); }, WithoutGil())
      .def(
          "tier_stats",
          [stats_type](PyEngine& self, const std::string& tier) {
            TierStats stats;
            {
              const nb::gil_scoped_release unlocked;
              stats = self.get().tier_stats(tier);
            }
            return stats_type(stats.capacity_bytes, stats.used_bytes, stats.peak_used_bytes, stats.reserve_seconds,
                              stats.resident_bytes, stats.peak_resident_bytes);
          },
          "tier"_a)
      .def(
          "live_handles", [](PyEngine& self) { return self.get().live_handles(); }, WithoutGil())
      .def("close", [](PyEngine& self) { self.get().close(); }, WithoutGil());
}

// Memory of torch's allocator that an arena holds without a tensor, by address. The allocator is called through torch's
// two Python functions, so that nothing here links to torch. A signal handler runs before or after a call of this,
// never between what the allocator did and the update of `held_`.
class Holds {
 public:
  Holds(nb::callable take, nb::callable give) : take_(std::move(take)), give_(std::move(give)) {}

  uint64_t take(uint64_t nbytes, uint64_t stream) {
    const auto address = nb::cast<uint64_t>(take_(nbytes, stream));
    held_.emplace(address, nbytes);
    return address;
  }

  bool give(uint64_t address) {
    if (held_.erase(address) == 0) return false;
    give_(address);
    return true;
  }

  void give_all() {
    while (!held_.empty()) give(held_.begin()->first);
  }

  // Returns the first of `moves` that had another result, and the address found instead; None if there is none.
  // Consecutive takes of the same size may succeed in any order: of equal blocks the allocator returns that of its
  // older segment first.
  nb::object make(const nb::tuple& moves, uint64_t stream) {
    const auto end = moves.end();
    for (auto move = moves.begin(); move != end;) {
      const auto nbytes = nb::cast<uint64_t>((*move)[0]);
      std::vector<uint64_t> expected, found;
      do {
        expected.push_back(nb::cast<uint64_t>((*move)[1]));
        found.push_back(nbytes != 0 ? take(nbytes, stream) : give(expected.back()) ? expected.back() : 0);
        ++move;
      } while (move != end && nbytes != 0 && nb::cast<uint64_t>((*move)[0]) == nbytes);
      std::ranges::sort(expected);
      std::ranges::sort(found);
      const auto [at, instead] = std::ranges::mismatch(expected, found);
      if (at != expected.end()) return nb::make_tuple(nbytes, *at, *instead);
    }
    return nb::none();
  }

  nb::dict held() const {
    nb::dict held;
    for (const auto& [address, nbytes] : held_) held[nb::int_(address)] = nbytes;
    return held;
  }

 private:
  nb::callable take_, give_;
  std::map<uint64_t, uint64_t> held_;
};

void bind_holds(nb::module_& module) {
  nb::class_<Holds>(module, "Holds")
      .def(nb::init<nb::callable, nb::callable>(), "take"_a, "give"_a)
      .def("take", &Holds::take, "nbytes"_a, "stream"_a)
      .def("give_all", &Holds::give_all)
      .def("make", &Holds::make, "moves"_a, "stream"_a)
      .def("held", &Holds::held);
}

void bind_device(nb::module_& module) {
  module.def(
      "device_bytes",
      [](int device, const std::string& library) {
        const nb::gil_scoped_release unlocked;
        const DeviceBytes bytes = open_cuda_driver(library, device)->device_bytes();
        return std::pair(bytes.free, bytes.total);
      },
      "device"_a, "library"_a = "libcuda.so.1");
}

void bind_float_mode(nb::module_& module) { module.def("float_mode", &float_mode); }

void bind_heap(nb::module_& module) {
  // No named tuple: each step reads some of these, and the constructor of a named tuple is Python.
  nb::class_<heap::Stats>(module, "HeapStats")
      .def_ro("live_bytes", &heap::Stats::live_bytes)
      .def_ro("peak_live_bytes", &heap::Stats::peak_live_bytes)
      .def_ro("retained_bytes", &heap::Stats::retained_bytes)
      .def_ro("peak_resident_bytes", &heap::Stats::peak_resident_bytes)
      .def_ro("num_fresh_pages", &heap::Stats::num_fresh_pages);
  module.def(
      "heap_install",
      [](int64_t threshold, const std::vector<std::string>& libraries) {
        heap::install(checked("threshold_bytes", threshold), libraries);
      },
      "threshold_bytes"_a, "libraries"_a);
  module.def("heap_uninstall", &heap::uninstall);
  module.def("heap_is_installed", &heap::is_installed);
  module.def("heap_owns", [](uint64_t pointer) { return heap::owns(pointer); }, "pointer"_a);
  module.def("heap_stats", &heap::stats);
  module.def("heap_reusable_bytes", &heap::reusable_bytes);
  module.def(
      "heap_changes",
      [](double start, double stop) {
        nb::list changes;
        for (const auto& [seconds, live_bytes] : heap::changes(start, stop)) {
          changes.append(nb::make_tuple(seconds, live_bytes));
        }
        return changes;
      },
      "start_seconds"_a, "stop_seconds"_a);
  module.def("heap_reset_peak", &heap::reset_peak);
  module.def(
      "heap_set_limit", [](int64_t resident) { heap::set_limit(checked("resident_bytes", resident)); },
      "resident_bytes"_a);
  module.def("heap_trim", &heap::trim);
  module.def("heap_lend", [](int64_t nbytes) { heap::decommit(checked("nbytes", nbytes)); }, "nbytes"_a);
}

}  // namespace
}  // namespace lmswap

NB_MODULE(_C, module) {
  // Engines live as long as the models they serve, which may be as long as the process.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(lmswap::translate_error);
  lmswap::bind_engine(module);
  lmswap::bind_holds(module);
  lmswap::bind_device(module);
  lmswap::bind_float_mode(module);
  lmswap::bind_heap(module);
}
