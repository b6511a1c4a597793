#include "fake_cuda/driver/accesses.h"

#include "fake_cuda/driver/memory.h"
#include "fake_cuda/driver/reports.h"

namespace fake {

Site Accesses::site(const std::string& name, const std::string& stream) {
  const std::string text = name + " on " + stream;
  auto [place, is_new] = site_of_.try_emplace(text, static_cast<Site>(sites_.size()));
  if (is_new) sites_.push_back(text);
  return place->second;
}

Accesses::Segments::iterator Accesses::cut(uintptr_t address, uintptr_t end) {
  auto split = [this](uintptr_t at) {
    auto segment = segments_.upper_bound(at);
    if (segment == segments_.begin()) return;
    --segment;
    if (segment->first >= at || segment->second.end <= at) return;
    segments_.emplace(at, segment->second);
    segment->second.end = at;
  };
  split(address);
  split(end);
  return segments_.lower_bound(address);
}

void Accesses::race(uintptr_t address, size_t bytes, Access earlier, bool earlier_writes, Access later,
                    bool later_writes) {
  auto action = [](bool writes) { return writes ? "write by " : "read by "; };
  reports().add(Kind::kRace, std::string(action(earlier_writes)) + sites_[earlier.site] + " and " +
                                 action(later_writes) + sites_[later.site] +
                                 " are not ordered: " + memory().describe(address, bytes));
}

void Accesses::read(uintptr_t address, size_t bytes, Access access, const Clock& clock) {
  const uintptr_t end = address + bytes;
  auto segment = cut(address, end);
  while (address < end) {
    if (segment == segments_.end() || segment->first > address) {  // never touched
      const uintptr_t next = segment == segments_.end() ? end : std::min(end, segment->first);
      segment = segments_.emplace_hint(segment, address, Segment{next, {}, {access}});
    } else {
      Segment& last = segment->second;
      if (!clock.has_seen(last.written.epoch)) {
        race(address, last.end - address, last.written, true, access, false);
      }
      // A read that this one is ordered after needs no place: whoever is ordered after this is after that one too.
      std::erase_if(last.reads, [&](const Access& read) { return clock.has_seen(read.epoch); });
      last.reads.push_back(access);
    }
    address = segment->second.end;
    ++segment;
  }
}

void Accesses::write(uintptr_t address, size_t bytes, Access access, const Clock& clock) {
  const uintptr_t end = address + bytes;
  auto segment = cut(address, end);
  while (segment != segments_.end() && segment->first < end) {
    const Segment& last = segment->second;
    if (!clock.has_seen(last.written.epoch)) {
      race(segment->first, last.end - segment->first, last.written, true, access, true);
    }
    for (const Access& read : last.reads) {
      if (!clock.has_seen(read.epoch)) race(segment->first, last.end - segment->first, read, false, access, true);
    }
    segment = segments_.erase(segment);
  }
  segments_[address] = Segment{end, access, {}};
}

void Accesses::begin(uintptr_t address, size_t bytes, Access access) {
  forget(address, bytes);
  segments_[address] = Segment{address + bytes, access, {}};
}

void Accesses::forget(uintptr_t address, size_t bytes) {
  auto segment = cut(address, address + bytes);
  while (segment != segments_.end() && segment->first < address + bytes) segment = segments_.erase(segment);
}

void Accesses::clear() {
  segments_.clear();
  sites_.clear();
  site_of_.clear();
}

Accesses& accesses() {
  static Accesses* const instance = new Accesses;  // threads may outlive what is destroyed at exit
  return *instance;
}

}  // namespace fake
