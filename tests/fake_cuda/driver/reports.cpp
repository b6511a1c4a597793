#include "fake_cuda/driver/reports.h"

namespace fake {

void Reports::add(Kind kind, std::string text) {
  auto [place, is_new] = seen_.try_emplace(text, reports_.size());
  if (is_new) {
    reports_.push_back({kind, std::move(text)});
  } else {
    ++reports_[place->second].count;
  }
}

void Reports::clear() {
  reports_.clear();
  seen_.clear();
}

Reports& reports() {
  static Reports* const instance = new Reports;  // threads may outlive what is destroyed at exit
  return *instance;
}

}  // namespace fake
