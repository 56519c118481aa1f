// Guards against GPU memory that is lost, or mapped where it should not be, when it is shared, replaced or given back.
#include "engine/nvlink/device_memory.h"

#include <cstring>
#include <string>

#include "base/status.h"
#include "check.h"
#include "engine/nvlink/fake_cuda.h"
#include "weft/config/base.h"

using namespace weft;
using namespace weft::nvlink;

namespace {

constexpr u64 kBytes = u64{2} << 20;

bool nothing_is_left() { return fake_cuda::num_mapped() == 0 && fake_cuda::physical_bytes() == 0; }

}  // namespace

TEST(shared_memory_is_the_same_and_outlives_its_maker) {
  {
    DeviceMemory mine = DeviceMemory::create(0, 100);
    CHECK_EQ(mine.bytes(), kBytes);
    const DeviceMemory theirs = DeviceMemory::attach(0, mine.share(), mine.bytes());
    mine.data()[99] = 7;
    CHECK(theirs.address() != mine.address());
    CHECK_EQ(theirs.data()[99], u8{7});
    mine = DeviceMemory();
    CHECK_EQ(theirs.data()[99], u8{7});
    CHECK_EQ(fake_cuda::physical_bytes(), static_cast<i64>(kBytes));
  }
  CHECK(nothing_is_left());
}

TEST(other_memory_comes_to_the_same_place) {
  {
    DeviceMemory place;
    place.replace(DeviceMemory::create(0, kBytes));
    const u64 address = place.address();
    const DeviceMemory old = DeviceMemory::attach(0, place.share(), kBytes);
    place.data()[0] = 1;
    place.replace(DeviceMemory::create(0, kBytes));
    CHECK_EQ(place.address(), address);
    CHECK_EQ(place.data()[0], u8{0});
    place.data()[0] = 2;
    CHECK_EQ(old.data()[0], u8{1});  // who had the old memory has it still, and only that
    place.drop();
    CHECK(!place.is_mapped());
    CHECK_EQ(place.address(), address);
    place.replace(DeviceMemory::create(0, kBytes));
    CHECK_EQ(place.address(), address);
    CHECK_THROWS(place.replace(DeviceMemory::create(0, 2 * kBytes)), Error,
                 [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kInternalError); });
  }
  CHECK(nothing_is_left());
}

TEST(memory_that_cannot_be_mapped_is_not_lost) {
  fake_cuda::fail_next("cuMemMap", 2);
  CHECK_THROWS(DeviceMemory::create(0, kBytes), Error,
               [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kCudaError); });
  CHECK(nothing_is_left());
}

TEST(handles_for_other_machines_are_made_only_where_the_driver_offers_them) {
  const MemoryOptions options{.spans_machines = true};
  CHECK_THROWS(DeviceMemory::create(0, kBytes, options), Error,
               [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kUnsupported); });
  fake_cuda::offer_fabric(true);
  {
    const DeviceMemory near = DeviceMemory::create(0, kBytes);
    CHECK_THROWS(static_cast<void>(near.share_fabric()), Error,
                 [](const Error& error) { CHECK_EQ(error.code, ErrorCode::kCudaError); });
    const DeviceMemory mine = DeviceMemory::create(0, kBytes, options);
    const DeviceMemory theirs = DeviceMemory::attach(0, mine.share_fabric(), kBytes);
    const DeviceMemory local = DeviceMemory::attach(0, mine.share(), kBytes);
    mine.data()[5] = 3;
    CHECK_EQ(theirs.data()[5], u8{3});
    CHECK_EQ(local.data()[5], u8{3});
  }
  fake_cuda::offer_fabric(false);
  CHECK(nothing_is_left());
}

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
