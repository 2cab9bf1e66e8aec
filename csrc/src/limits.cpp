#include "lmswap/limits.h"

#include <sys/resource.h>

#include "lmswap/text.h"

namespace lmswap {
namespace {

std::string number_of_threads() {
  for (const std::string& line : split(read_file("/proc/self/status"), '\n')) {
    if (line.starts_with("Threads:")) return line.substr(line.find_last_of("\t ") + 1);
  }
  return "unknown";
}

std::string limit_of_user() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NPROC, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "no limit" : std::to_string(limit.rlim_cur);
}

// Handles both versions of control groups. In a container the path may exist only outside of it.
std::string limit_of_group() {
  for (const std::string& line : split(read_file("/proc/self/cgroup"), '\n')) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers != "pids") continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids";
    for (const std::string& folder : {root + line.substr(second + 1), root}) {
      const std::vector<std::string> limit = split(read_file(folder + "/pids.max"), '\n');
      if (!limit.empty() && limit[0] != "max") return limit[0];
    }
  }
  return "no limit known";
}

}  // namespace

std::string thread_refusal_text(const std::string& name, int code) {
  return name + " cannot be started: " + errno_text(code) +
         ". This process has so many threads: " + number_of_threads() +
         "; its user may have, processes counted too: " + limit_of_user() +
         " (ulimit -u); its control group: " + limit_of_group() +
         " (pids.max). Raise the limit that is reached, or run fewer processes and threads beside it";
}

std::string file_size_advice(uint64_t nbytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < nbytes) {
    return "The process may write files of at most " + format_bytes(limit.rlim_cur) +
           ": raise that limit (ulimit -f), or swap less";
  }
  return "No file there can be that large: name a directory of another filesystem, or swap less";
}

}  // namespace lmswap
