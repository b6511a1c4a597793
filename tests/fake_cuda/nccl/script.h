// The script of faults and modes: see [Note: the script] in nccl/control.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fake_nccl {

struct Statement {
  std::string verb;
  std::map<std::string, std::string> words;

  std::optional<int64_t> number(const char* key) const;
};

// Whom a question to the script is about.
struct Subject {
  int rank = -1;
  int comm = -1;  // ordinal
  int64_t launch = -1;
};

class Script {
 public:
  // Throws std::invalid_argument: an unknown verb or key, or a value that is no number.
  static Script parse(const std::string& text);

  // The first statement of the verb that the subject fits, or null.
  const Statement* find(const char* verb, const Subject& subject = {}) const;
  // number(key) of find(verb), or otherwise.
  int64_t value(const char* verb, const char* key, int64_t otherwise, const Subject& subject = {}) const;
  bool allows(const std::string& rule) const;

 private:
  std::vector<Statement> statements_;
};

// What misuse() may be called with.
bool is_rule(const std::string& rule);

// The script in force, of which a replacement invalidates what find gave. Read under the lock. The environment's, until
// replaced; one that does not parse is reported as a misuse and fails every init.
const Script& script();
void replace_script(Script script);
// What is wrong with the environment's script, or empty.
const std::string& script_fault();

}  // namespace fake_nccl
