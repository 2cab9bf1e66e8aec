#include "lmswap/faults.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <string_view>
#include <thread>

#include "lmswap/error.h"
#include "lmswap/text.h"

namespace lmswap {
namespace {

constexpr std::array<std::string_view, 8> kCalls = {"allocate_host", "allocate_device", "copy_out", "copy_in",
                                                    "copy_between",  "reserve",         "write",    "read"};

}  // namespace

Faults::Rule Faults::parse_rule(const std::string& text) {
  const auto bad = [&](const std::string& why) {
    return OptionError("faults: '" + text + "' is not call@n=effect: " + why);
  };
  const size_t at = text.find('@'), equals = text.find('=');
  if (at == std::string::npos || equals == std::string::npos || equals < at) throw bad("'@' or '=' is missing");
  Rule rule{text.substr(0, at), 0, 1.0, {}, false};
  const std::string nth = text.substr(at + 1, equals - at - 1), effect = text.substr(equals + 1);
  if (std::find(kCalls.begin(), kCalls.end(), rule.call) == kCalls.end()) throw bad("no such call");
  const size_t colon = effect.find(':');
  const std::string verb = effect.substr(0, colon);
  const bool is_share = nth.find('.') != std::string::npos, is_numbered = !is_share && nth != "*";
  try {
    if (is_share) rule.share = std::stod(nth);
    if (is_numbered) rule.nth = std::stoull(nth);
    if (colon != std::string::npos) rule.fault.late_seconds = std::stod(effect.substr(colon + 1));
  } catch (const std::exception&) {
    throw bad("a number cannot be read");
  }
  if (is_numbered && rule.nth == 0) throw bad("calls are counted from 1");
  if (!(rule.share > 0 && rule.share <= 1)) throw bad("a share is more than 0 and at most 1");
  const bool has_seconds = colon != std::string::npos;
  rule.fault.fail = verb == "fail";
  rule.fault.is_short = verb == "short";
  rule.fault.flips = verb == "flip";
  rule.is_random = verb == "jitter";
  const bool is_timed = rule.is_random || verb == "late";
  if (!is_timed && !rule.fault.fail && !rule.fault.is_short && !rule.fault.flips) {
    throw bad("effects are fail, short, flip, late:S and jitter:S");
  }
  if (rule.fault.flips && !rule.call.starts_with("copy_") && rule.call != "read") {
    throw bad("only what is copied or read can flip");
  }
  if (is_timed != has_seconds) throw bad("late and jitter take seconds, the others do not");
  return rule;
}

Faults::Faults(const std::string& specification) {
  for (const std::string& text : split(specification, ',')) rules_.push_back(parse_rule(text));
}

Fault Faults::next(const std::string& call) {
  Fault result;
  if (rules_.empty()) return result;
  const std::lock_guard lock(mutex_);
  const uint64_t nth = ++num_calls_[call];
  for (const Rule& rule : rules_) {
    if (rule.call != call || (rule.nth != 0 && rule.nth != nth)) continue;
    if (rule.share < 1 && std::uniform_real_distribution<double>(0, 1)(random_) >= rule.share) continue;
    result.fail |= rule.fault.fail;
    result.is_short |= rule.fault.is_short;
    result.flips |= rule.fault.flips;
    const double share = rule.is_random ? std::uniform_real_distribution<double>(0, 1)(random_) : 1.0;
    result.late_seconds += rule.fault.late_seconds * share;
  }
  return result;
}

Fault Faults::next_after_delay(const std::string& call) {
  const Fault fault = next(call);
  if (fault.late_seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(fault.late_seconds));
  return fault;
}

}  // namespace lmswap
