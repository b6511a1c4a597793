#include "fake_cuda/nccl/script.h"

#include <cstdlib>
#include <set>
#include <sstream>
#include <stdexcept>

namespace fake_nccl {
namespace {

using Keys = std::set<std::string>;

const std::map<std::string, Keys>& verbs() {
  static const std::map<std::string, Keys> known = {
      {"delay", {"rank", "comm", "launch", "ms", "steps"}},
      {"async_error", {"rank", "comm", "launch", "result"}},
      {"die", {"rank", "comm", "launch"}},
      {"block", {"rank", "comm", "launch", "ms"}},
      {"remote_error", {"ms"}},
      {"init_hang", {"rank", "comm", "ms"}},
      {"init_error", {"rank", "comm", "result", "text"}},
      {"abort_hang", {"rank", "comm", "ms"}},
      {"no_windows", {"rank", "comm"}},
      {"no_cumem", {}},
      {"slots", {"n"}},
      {"polls", {"n"}},
      {"fp32_sums", {}},
      {"ring", {"seed"}},
      {"allow", {"rule"}},
  };
  return known;
}

// Those that misuse() is called with, so that none is allowed by a wrong name.
const Keys& rules() {
  static const Keys known = {"abort-inside",
                             "after-end",
                             "busy",
                             "capacity",
                             "config",
                             "deadlock",
                             "destroy-failed",
                             "double-window",
                             "forked",
                             "group",
                             "group-blocking",
                             "group-streams",
                             "in-place",
                             "in-progress",
                             "launch-order",
                             "mismatch",
                             "no-context",
                             "no-communicator",
                             "null-stream",
                             "freed-while-registered",
                             "script",
                             "still-registered",
                             "two-threads",
                             "ungrouped",
                             "unique-id-twice",
                             "unknown-window",
                             "unpaired-free",
                             "window-alignment",
                             "window-partial",
                             "window-range",
                             "wrong-device"};
  return known;
}

bool is_text(const std::string& key) { return key == "text" || key == "rule"; }

bool is_number(const std::string& value) {
  return !value.empty() && value.size() < 16 && value.find_first_not_of("0123456789") == std::string::npos;
}

Statement parse_statement(const std::string& text) {
  std::istringstream words(text);
  Statement statement;
  words >> statement.verb;
  const auto verb = verbs().find(statement.verb);
  if (verb == verbs().end()) throw std::invalid_argument("unknown verb '" + statement.verb + "'");
  std::string word;
  while (words >> word) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    if (equals == std::string::npos || !verb->second.contains(key))
      throw std::invalid_argument("'" + statement.verb + "' does not take '" + word + "'");
    std::string value = word.substr(equals + 1);
    if (key == "text") {
      std::string rest;
      std::getline(words, rest);
      value += rest;
    }
    if (!is_text(key) && !is_number(value)) throw std::invalid_argument("'" + word + "' is no whole number");
    if (key == "rule" && !rules().contains(value)) throw std::invalid_argument("unknown rule '" + value + "'");
    statement.words[key] = value;
  }
  return statement;
}

bool fits(const Statement& statement, const Subject& subject) {
  const auto agrees = [&](const char* key, int64_t value) { return statement.number(key).value_or(value) == value; };
  return agrees("rank", subject.rank) && agrees("comm", subject.comm) && agrees("launch", subject.launch);
}

struct InForce {
  Script script;
  std::string fault;

  InForce() {
    const char* text = std::getenv("FAKE_NCCL_SCRIPT");
    if (text == nullptr) return;
    try {
      script = Script::parse(text);
    } catch (const std::invalid_argument& error) {
      fault = std::string("FAKE_NCCL_SCRIPT: ") + error.what();
    }
  }
};

InForce& in_force() {
  static auto* const one = new InForce;
  return *one;
}

}  // namespace

std::optional<int64_t> Statement::number(const char* key) const {
  const auto word = words.find(key);
  if (word == words.end()) return std::nullopt;
  return std::stoll(word->second);
}

Script Script::parse(const std::string& text) {
  Script script;
  std::string line;
  for (const char character : text + ";") {
    if (character != ';' && character != '\n') {
      line += character;
      continue;
    }
    if (line.find_first_not_of(" \t") != std::string::npos) script.statements_.push_back(parse_statement(line));
    line.clear();
  }
  return script;
}

const Statement* Script::find(const char* verb, const Subject& subject) const {
  for (const Statement& statement : statements_)
    if (statement.verb == verb && fits(statement, subject)) return &statement;
  return nullptr;
}

int64_t Script::value(const char* verb, const char* key, int64_t otherwise, const Subject& subject) const {
  const Statement* statement = find(verb, subject);
  return statement == nullptr ? otherwise : statement->number(key).value_or(otherwise);
}

bool Script::allows(const std::string& rule) const {
  for (const Statement& statement : statements_)
    if (statement.verb == "allow" && statement.words.contains("rule") && statement.words.at("rule") == rule)
      return true;
  return false;
}

bool is_rule(const std::string& rule) { return rules().contains(rule); }

const Script& script() { return in_force().script; }
const std::string& script_fault() { return in_force().fault; }

void replace_script(Script script) {
  in_force().script = std::move(script);
  in_force().fault.clear();
}

}  // namespace fake_nccl
