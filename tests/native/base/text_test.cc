// Guards against text of a peer or a user that is no UTF-8, which Python refuses, has several lines, or has no end.
#include "base/text.h"

#include <string>
#include <utility>

#include "check.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

TEST(what_is_no_character_becomes_a_question_mark) {
  const std::pair<std::string, std::string> cases[] = {
      {"plain", "plain"},
      {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\x89", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\x89"},  // two, three and four bytes
      {"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf", "\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf"},  // next to what is none
      {"\x80 \xff \xc0\xaf", "? ? ??"},
      {"\xe0\x9f\xbf|\xf0\x8f\xbf\xbf", "???|????"},  // longer than need be
      {"\xed\xa0\x80|\xf4\x90\x80\x80", "???|????"},  // a surrogate, and beyond the last one
      {"\xc3", "?"},
      {"\xe2\x82", "??"},
      {"\xe2\x28\xac", "?(?"},
  };
  for (const auto& [given, made] : cases) CHECK_EQ(one_line(given, 100), made);
}

TEST(control_characters_become_spaces_and_those_at_the_end_go) {
  CHECK_EQ(one_line(std::string("a\tb\r\nc\0d\x7f e \n", 13), 100), std::string("a b  c d  e"));
  CHECK_EQ(one_line("\n\n", 100), std::string());
}

TEST(the_end_is_cut_between_characters) {
  CHECK_EQ(one_line("abcdef", 3), std::string("abc"));
  CHECK_EQ(one_line("ab\xe2\x82\xac", 4), std::string("ab"));
  CHECK_EQ(one_line("ab\xe2\x82\xac", 5), std::string("ab\xe2\x82\xac"));
  CHECK_EQ(one_line("abc", 0), std::string());
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
