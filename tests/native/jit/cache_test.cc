// Guards against compiled kernels that are taken from where another user could have put them, and against half files.
#include "jit/cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "check.h"

using namespace weft;

namespace {

namespace fs = std::filesystem;

// A folder of this test alone.
struct Folder {
  fs::path path;
  Folder() {
    std::string name = (fs::temp_directory_path() / "weft-cache-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path); }
};

}  // namespace

TEST(what_is_written_is_read_by_the_next) {
  const Folder folder;
  const fs::path place = folder.path / "not" / "there" / "yet";
  const jit::Cache cache(place.string());
  CHECK(cache.usable());
  struct stat status{};
  CHECK_EQ(stat(place.c_str(), &status), 0);
  CHECK_EQ(status.st_mode & 0777, mode_t{0700});
  CHECK(!cache.read("a").has_value());
  cache.write("a", std::string("\0code", 5));
  CHECK(jit::Cache(place.string()).read("a") == std::string("\0code", 5));
  CHECK_EQ(std::distance(fs::directory_iterator(place), fs::directory_iterator{}), std::ptrdiff_t{1});
  cache.describe("a", "source");
  std::string source;
  std::getline(std::ifstream(place / "a.cu"), source);
  CHECK_EQ(source, std::string("source"));
  CHECK_EQ(std::distance(fs::directory_iterator(place), fs::directory_iterator{}), std::ptrdiff_t{2});
}

TEST(folders_that_others_could_have_filled_are_not_used) {
  const Folder folder;
  fs::create_directory(folder.path / "open");
  fs::permissions(folder.path / "open", fs::perms::all);
  CHECK(!jit::Cache((folder.path / "open").string()).usable());
  fs::create_directory(folder.path / "real");
  fs::create_directory_symlink(folder.path / "real", folder.path / "link");
  CHECK(!jit::Cache((folder.path / "link").string()).usable());
  std::ofstream(folder.path / "file") << "no folder";
  CHECK(!jit::Cache((folder.path / "file").string()).usable());
  CHECK(!jit::Cache("").usable());
  const jit::Cache unusable((folder.path / "open").string());
  unusable.write("a", "code");
  unusable.describe("a", "source");
  CHECK(!unusable.read("a").has_value());
  CHECK(fs::is_empty(folder.path / "open"));
}

TEST(a_link_in_the_folder_is_not_followed) {
  const Folder folder;
  const jit::Cache cache((folder.path / "cache").string());
  std::ofstream(folder.path / "elsewhere") << "code";
  fs::create_symlink(folder.path / "elsewhere", folder.path / "cache" / "a.cubin");
  CHECK(!cache.read("a").has_value());
}

TEST(keys_differ_with_their_content) {
  CHECK(jit::content_key("a") != jit::content_key("b"));
  CHECK_EQ(jit::content_key("a"), jit::content_key("a"));
  CHECK_EQ(jit::content_key("a").size(), size_t{32});
}

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
