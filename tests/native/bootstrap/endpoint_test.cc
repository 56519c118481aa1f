// Guards against lists of endpoints that some ranks take and others refuse, and against groups on one machine that need a network.
#include "bootstrap/endpoint.h"

#include <vector>

#include "bootstrap/build.h"
#include "bootstrap/handshake.h"
#include "bootstrap/ranks.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

// A wrong interface, a full range of ports, a sandbox without them: nothing that a group of one machine has to know.
TEST(a_door_that_can_t_be_made_matters_between_machines_alone) {
  const DoorOptions wrong{"no-such-interface"};
  const Listener first(&wrong, "a");
  const Listener near(&wrong, "a");
  const Listener far(&wrong, "b");
  CHECK_EQ(first.endpoint().num_addresses, 0);
  check_endpoints(0, {first.endpoint(), near.endpoint()}, first.endpoint(), true, first.door_problem());
  try {
    check_endpoints(1, {far.endpoint(), first.endpoint()}, first.endpoint(), true, first.door_problem());
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code, ErrorCode::kInvalidArgument);
    CHECK(error.text.find("no-such-interface") != std::string::npos);
  }
}

// Every rank refuses it, those of other machines too: they would wait for ranks that can't connect.
TEST(users_that_differ_on_one_machine_are_refused_everywhere) {
  const DoorOptions door{"lo"};
  const Listener first(&door, "a");
  const Listener second(&door, "b");
  const Listener third(&door, "b");
  std::vector<Endpoint> endpoints{first.endpoint(), second.endpoint(), third.endpoint()};
  for (Endpoint* each : {&endpoints[1], &endpoints[2]}) ++each->uid;
  for (int rank = 0; rank < 3; ++rank) check_endpoints(rank, endpoints, endpoints[static_cast<size_t>(rank)], true);
  --endpoints[2].uid;
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_ERROR(kUnsupported, {}, check_endpoints(rank, endpoints, endpoints[static_cast<size_t>(rank)], true));
  }
}

// Guards against founders that read each other's memory by different layouts.
TEST(endpoints_of_another_build_are_refused) {
  const Listener first;
  const Listener second;
  const auto check = [&](int rank, const std::vector<Endpoint>& endpoints) {
    check_endpoints(rank, endpoints, first.endpoint());
  };
  for (const bool is_first : {false, true}) {  // all ranks are told the same
    Endpoint other_version = second.endpoint();
    other_version.weft_version = {'9', '.', '9'};
    other_version.sources[1] ^= 1;
    Endpoint other_sources = second.endpoint();
    other_sources.sources[15] ^= 1;
    for (const Endpoint& other : {other_version, other_sources}) {
      const bool is_version = other.weft_version != second.endpoint().weft_version;
      try {
        is_first ? check(1, {other, first.endpoint()}) : check(0, {first.endpoint(), other});
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.code == ErrorCode::kUnsupported);
        const Build ours = this_build();
        const std::string mine = is_version ? "Weft " + version_text(ours) : sources_text(ours).substr(0, 32);
        const std::string theirs = is_version ? "Weft 9.9" : hex_text(other.sources);
        CHECK(error.text.find(mine) != std::string::npos);
        CHECK(error.text.find(theirs) != std::string::npos);
      }
    }
  }
}

// Every rank names the same one, whatever else is in the way: here a rank on another machine, where none may be.
TEST(founders_of_an_older_endpoint_are_named_with_both_versions) {
  const Listener first;
  const Listener second;
  const Listener third;
  Endpoint elsewhere = second.endpoint();
  elsewhere.boot_id[3] ^= 1;
  Endpoint older = third.endpoint();
  older.version = kEndpointVersion - 1;
  Endpoint other_build = third.endpoint();
  other_build.weft_version = {'9', '.', '9'};
  const auto text = [&](int rank, std::vector<Endpoint> endpoints) {
    const Endpoint& own = rank == 0 ? first.endpoint() : elsewhere;
    try {
      check_endpoints(rank, endpoints, own);
    } catch (const Error& error) {
      CHECK_EQ(error.code, ErrorCode::kUnsupported);
      return error.text;
    }
    return std::string();
  };
  const auto version = [](u32 number) { return " of version " + std::to_string(number); };
  for (const int rank : {0, 1}) {
    CHECK_EQ(text(rank, {first.endpoint(), elsewhere, older}),
             "the endpoint of rank 2 is" + version(kEndpointVersion - 1) + ", those of this Weft (" +
                 version_text(this_build()) + ")" + version(kEndpointVersion) + "; all ranks need the same Weft");
    CHECK_EQ(text(rank, {first.endpoint(), elsewhere, other_build}).find("rank 2 is Weft 9.9"), 0u);
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
