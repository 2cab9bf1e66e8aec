// The Python module lmswap.planner._core. The contract is lmswap/planner/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "exact.h"
#include "pack.h"
#include "predict.h"
#include "search.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lmswap::planner {
namespace {

using Lists = std::vector<std::vector<int>>;
using Points = std::vector<std::pair<Bytes, double>>;

void make_step(Step* self, std::vector<double> seconds, std::vector<Bytes> scratch_bytes,
               const std::vector<bool>& repeatable, const Lists& reads, const Lists& writes, std::vector<Bytes> nbytes,
               const std::vector<int>& lifetime, const std::vector<std::tuple<int, int, int>>& segments) {
  new (self) Step;
  self->seconds = std::move(seconds);
  self->scratch_bytes = std::move(scratch_bytes);
  self->repeatable.assign(repeatable.begin(), repeatable.end());
  self->reads = Rows(reads);
  self->writes = Rows(writes);
  self->nbytes = std::move(nbytes);
  for (const int kind : lifetime) self->lifetime.push_back(static_cast<Lifetime>(kind));
  for (const auto& [start, stop, forward] : segments) self->segments.push_back({start, stop, forward});
  self->derive();
}

}  // namespace
}  // namespace lmswap::planner

NB_MODULE(_core, module) {
  using namespace lmswap::planner;
  nb::class_<Step>(module, "Step")
      .def("__init__", &make_step, "seconds"_a, "scratch_bytes"_a, "repeatable"_a, "reads"_a, "writes"_a, "nbytes"_a,
           "lifetime"_a, "segments"_a);
  nb::class_<Link>(module, "Link")
      .def(
          "__init__",
          [](Link* self, Points out, Points in, double both_factor, double compute_factor, double host_op_seconds,
             double host_copy_seconds) {
            new (self) Link{{std::move(out)}, {std::move(in)}, both_factor,
                            compute_factor,   host_op_seconds, host_copy_seconds};
          },
          "out"_a, "into"_a, "both_factor"_a, "compute_factor"_a, "host_op_seconds"_a, "host_copy_seconds"_a);
  nb::class_<Swap>(module, "Swap")
      .def_ro("version", &Swap::version)
      .def_ro("out_start", &Swap::out_start)
      .def_ro("release", &Swap::release)
      .def_ro("in_start", &Swap::in_start)
      .def_ro("first_use", &Swap::first_use);
  nb::class_<SearchResult>(module, "SearchResult")
      .def_ro("fits", &SearchResult::fits)
      .def_ro("seconds", &SearchResult::seconds)
      .def_ro("excess_bytes", &SearchResult::excess_bytes)
      .def_ro("swaps", &SearchResult::swaps)
      .def_ro("evaluations", &SearchResult::evaluations)
      .def_ro("worst_op", &SearchResult::worst_op)
      .def_prop_ro("recomputes", [](const SearchResult& found) {
        std::vector<std::pair<int, int>> pairs;
        for (const auto& recompute : found.recomputes) pairs.emplace_back(recompute.op, recompute.position);
        return pairs;
      });
  nb::class_<Prices>(module, "Prices")
      .def(
          "__init__",
          [](Prices* self, std::vector<int> cuts, std::vector<double> memory, std::vector<double> out,
             std::vector<double> in) {
            new (self) Prices{std::move(cuts), std::move(memory), std::move(out), std::move(in)};
          },
          nb::kw_only(), "cuts"_a, "memory"_a, "out"_a, "into"_a);
  nb::class_<Limits>(module, "Limits")
      .def(
          "__init__",
          [](Limits* self, Bytes budget_bytes, Bytes tier_bytes, Bytes min_swap_bytes, bool may_swap,
             bool may_recompute, int prefetches_ahead) {
            new (self) Limits{budget_bytes, tier_bytes, min_swap_bytes, may_swap, may_recompute, prefetches_ahead};
          },
          nb::kw_only(), "budget_bytes"_a, "tier_bytes"_a, "min_swap_bytes"_a, "may_swap"_a, "may_recompute"_a,
          "prefetches_ahead"_a);
  module.def("find_exactly", &find_exactly, nb::call_guard<nb::gil_scoped_release>(), "step"_a, "link"_a, "limits"_a,
             nb::kw_only(), "max_states"_a);
  module.def(
      "search",
      [](const Step& step, const Link& link, const Limits& limits, int max_evaluations, double target_seconds,
         Bytes tolerated_excess_bytes, const Prices& prices, unsigned seed) {
        return Search(step, link, limits, prices, seed).run(max_evaluations, target_seconds, tolerated_excess_bytes);
      },
      nb::call_guard<nb::gil_scoped_release>(), "step"_a, "link"_a, "limits"_a, nb::kw_only(), "max_evaluations"_a,
      "target_seconds"_a, "tolerated_excess_bytes"_a = 0, "prices"_a = Prices{}, "seed"_a);
  module.def("predict", &predict, nb::call_guard<nb::gil_scoped_release>(), "step"_a, "link"_a, "plan"_a);
  module.def(
      "pack",
      [](const std::vector<std::tuple<int, int, Bytes, int, int>>& blocks, Bytes separation_bytes,
         std::int64_t max_visits) {
        std::vector<Block> held;
        for (const auto& [start, stop, nbytes, above, group] : blocks) {
          held.push_back({start, stop, nbytes, above, group});
        }
        Packing packing = pack(held, separation_bytes, max_visits);
        return std::make_pair(std::move(packing.offsets), packing.capacity_bytes);
      },
      nb::call_guard<nb::gil_scoped_release>(), "blocks"_a, nb::kw_only(), "separation_bytes"_a, "max_visits"_a);
}
