#include "fake_cuda/nccl/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <system_error>

namespace fake_nccl {
namespace {

constexpr uint64_t kIdMagic = 0x66616b655f6e6363;

struct IdContent {
  uint64_t magic, uid;
  int pid, descriptor;
};
static_assert(sizeof(IdContent) <= sizeof(UniqueId));

struct Front {
  uint64_t uid;
  Member members[kMaxRanks];
};
constexpr size_t kHeadBytes = (sizeof(Front) + 4095) / 4096 * 4096;

size_t board_bytes(int size) { return kHeadBytes + 2 * kHalfBytes * static_cast<size_t>(size); }

struct Held {
  std::mutex mutex;
  std::map<uint64_t, int> descriptors;  // by uid
};
Held& held() {
  static auto* const one = new Held;
  return *one;
}

IdContent content_of(const UniqueId& id) {
  IdContent content;
  std::memcpy(&content, id.bytes, sizeof content);
  return content;
}

struct OpenFile {
  int number;
  ~OpenFile() {
    if (number >= 0) close(number);
  }
};

// Field `wanted` of /proc/<pid>/stat, counted from 1; those behind the name, which may hold spaces, only.
uint64_t stat_field(int pid, int wanted, char* state) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  OpenFile file{::open(path, O_RDONLY | O_CLOEXEC)};
  if (file.number < 0) return 0;
  const ssize_t length = read(file.number, text, sizeof text - 1);
  if (length <= 0) return 0;
  text[length] = 0;
  const char* at = std::strrchr(text, ')');
  if (at == nullptr) return 0;
  *state = at[2];
  for (int field = 2; field < wanted && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  return at == nullptr ? 0 : std::strtoull(at, nullptr, 10);
}
constexpr int kStartTimeField = 22;

}  // namespace

UniqueId Board::create() {
  const int descriptor = memfd_create("fake_nccl", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(board_bytes(kMaxRanks))) != 0)
    throw std::system_error(errno, std::generic_category(), "the board's memory");
  std::random_device random;
  const uint64_t uid = (uint64_t{random()} << 32 | random()) | 1;
  if (pwrite(descriptor, &uid, sizeof uid, 0) != sizeof uid)
    throw std::system_error(errno, std::generic_category(), "the board's memory");
  {
    std::lock_guard lock(held().mutex);
    held().descriptors[uid] = descriptor;
  }
  UniqueId id{};
  const IdContent content{kIdMagic, uid, getpid(), descriptor};
  std::memcpy(id.bytes, &content, sizeof content);
  return id;
}

std::shared_ptr<Board> Board::open(const UniqueId& id, int size, std::string* why) {
  const IdContent content = content_of(id);
  if (content.magic != kIdMagic) {
    *why = "not a unique id of ncclGetUniqueId";
    return nullptr;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", content.pid, content.descriptor);
  const OpenFile file{::open(path, O_RDWR | O_CLOEXEC)};
  uint64_t uid = 0;
  if (file.number < 0 || pread(file.number, &uid, sizeof uid, 0) != sizeof uid || uid != content.uid) {
    *why = "connection refused: the process that made the unique id is gone, or all of its ranks have come already";
    return nullptr;
  }
  const size_t bytes = board_bytes(size);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.number, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mapping the board");
  return std::shared_ptr<Board>(new Board(static_cast<std::byte*>(memory), bytes, uid, size));
}

void Board::release(const UniqueId& id) {
  const IdContent content = content_of(id);
  if (content.magic != kIdMagic || content.pid != getpid()) return;
  std::lock_guard lock(held().mutex);
  const auto entry = held().descriptors.find(content.uid);
  if (entry == held().descriptors.end()) return;
  close(entry->second);
  held().descriptors.erase(entry);
}

Board::Board(std::byte* memory, size_t bytes, uint64_t uid, int size)
    : memory_(memory), bytes_(bytes), uid_(uid), size_(size) {}

Board::~Board() { munmap(memory_, bytes_); }

Member& Board::member(int rank) { return reinterpret_cast<Front*>(memory_)->members[rank]; }

std::byte* Board::half(int rank, uint64_t launch) {
  return memory_ + kHeadBytes + (2 * static_cast<size_t>(rank) + launch % 2) * kHalfBytes;
}

uint64_t process_start_time() {
  char state = 0;
  return stat_field(getpid(), kStartTimeField, &state);
}

bool process_runs(int pid, uint64_t started) {
  char state = 0;
  return stat_field(pid, kStartTimeField, &state) == started && state != 'Z' && state != 'X';
}

}  // namespace fake_nccl
