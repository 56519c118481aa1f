// Guards against narrow formats that differ by a bit from the specification: ties, subnormals, NaN, infinity, saturation.
//
// The comparison shares nothing with the code: every value of a format is decoded with ldexp into a sorted table, and a
// float is rounded by looking for its neighbours in that table and comparing the distances in double.
#include "weft/ptx/convert.h"
#include "weft/ptx/fp8_scale.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // false: e4m3 "FN", the all-ones exponent holds numbers too, only the last code is NaN

  std::uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  std::uint32_t first_nan() const { return has_infinity ? infinity() + 1 : sign_bit() - 1; }
  std::uint32_t last_finite() const { return has_infinity ? infinity() - 1 : sign_bit() - 2; }
};

constexpr Format kBf16{8, 7, true};
constexpr Format kFp16{5, 10, true};
constexpr Format kE4m3{4, 3, false};

double decode_magnitude(const Format& format, std::uint32_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> format.mantissa_bits);
  const double mantissa = code & ((1u << format.mantissa_bits) - 1);
  const double unit = std::ldexp(1.0, -format.mantissa_bits);
  return exponent == 0 ? std::ldexp(mantissa * unit, 1 - bias) : std::ldexp(1.0 + mantissa * unit, exponent - bias);
}

class Model {
 public:
  explicit Model(const Format& format) : format_(format) {
    for (std::uint32_t code = 0; code <= format.last_finite(); ++code)
      values_.push_back(decode_magnitude(format, code));
    // Where the next value would be if the format went on: results that round to it overflow.
    const double step = values_.back() - values_[values_.size() - 2];
    overflow_ = values_.back() + step;
  }
  const Format& format() const { return format_; }
  const std::vector<double>& values() const { return values_; }
  double overflow() const { return overflow_; }

  std::uint32_t encode(float value) const {
    const std::uint32_t sign = std::signbit(value) ? format_.sign_bit() : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    const std::uint32_t last = format_.last_finite();
    const std::uint32_t beyond = format_.has_infinity ? format_.infinity() : last;
    if (magnitude >= values_.back()) {
      const double middle = (values_.back() + overflow_) / 2;
      return sign | (magnitude < middle ? last : beyond);  // the last finite code is odd: its tie goes up
    }
    const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
    const auto high = static_cast<std::uint32_t>(above - values_.begin());
    const std::uint32_t low = high - 1;
    const double down = magnitude - values_[low];
    const double up = values_[high] - magnitude;
    const bool takes_low = down < up || (down == up && low % 2 == 0);
    return sign | (takes_low ? low : high);
  }

 private:
  Format format_;
  std::vector<double> values_;
  double overflow_;
};

template <class Convert>
void check_encode(const Model& model, float value, const Convert& convert) {
  const std::uint32_t actual = convert(value);
  if (std::isnan(value)) {
    const std::uint32_t magnitude = actual & (model.format().sign_bit() - 1);
    const bool is_quiet = !model.format().has_infinity || (magnitude >> (model.format().mantissa_bits - 1) & 1u) != 0;
    CHECK(magnitude >= model.format().first_nan() && is_quiet);
    CHECK_EQ((actual & model.format().sign_bit()) != 0, std::signbit(value));
    return;
  }
  const std::uint32_t expected = model.encode(value);
  if (actual != expected) {
    CHECK_EQ(std::bit_cast<std::uint32_t>(value), 0u);  // shows the float
    CHECK_EQ(actual, expected);
  }
}

template <class Convert>
void check_around(const Model& model, double centre, const Convert& convert) {
  const float middle = static_cast<float>(centre);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {middle, std::nextafter(middle, infinity), std::nextafter(middle, -infinity)}) {
    check_encode(model, value, convert);
    check_encode(model, -value, convert);
  }
}

template <class Convert>
void check_format(const Format& format, const Convert& convert) {
  const Model model(format);
  const std::vector<double>& values = model.values();
  for (std::size_t code = 0; code < values.size(); ++code) {
    const double next = code + 1 < values.size() ? values[code + 1] : model.overflow();
    check_around(model, values[code], convert);
    check_around(model, (values[code] + next) / 2, convert);  // ties
  }
  check_around(model, model.overflow(), convert);
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {  // every binade of float, its ends and odd mantissas
    for (const std::uint32_t mantissa :
         {0u, 1u, 2u, 0x0fffu, 0x1000u, 0x1001u, 0x3fffffu, 0x400000u, 0x400001u, 0x7ffffeu, 0x7fffffu}) {
      check_encode(model, std::bit_cast<float>(exponent << 23 | mantissa), convert);
      check_encode(model, std::bit_cast<float>(1u << 31 | exponent << 23 | mantissa), convert);
    }
  }
  std::mt19937 random(11);
  for (int trial = 0; trial < 3'000'000; ++trial)
    check_encode(model, std::bit_cast<float>(static_cast<std::uint32_t>(random())), convert);
  // Random bits rarely fall into a narrow format's range: the same number spread over its binades and one beyond on each side.
  std::uniform_real_distribution<double> exponent(std::log2(values[1]) - 2, std::log2(values.back()) + 2);
  for (int trial = 0; trial < 1'000'000; ++trial) {
    const float value = static_cast<float>(std::exp2(exponent(random)));
    check_encode(model, trial % 2 == 0 ? value : -value, convert);
  }
}

TEST(float_to_bf16_rounds_to_even) {
  check_format(kBf16, [](float value) { return std::uint32_t{ptx::float_to_bf16(value)}; });
}

TEST(float_to_fp16_rounds_to_even) {
  check_format(kFp16, [](float value) { return std::uint32_t{ptx::float_to_fp16(value)}; });
}

TEST(float_to_e4m3_rounds_to_even_and_saturates) {
  check_format(kE4m3, [](float value) { return std::uint32_t{ptx::float_to_e4m3(value)}; });
  CHECK_EQ(int{ptx::float_to_e4m3(448.0f)}, 0x7e);
  CHECK_EQ(int{ptx::float_to_e4m3(1e30f)}, 0x7e);
  CHECK_EQ(int{ptx::float_to_e4m3(-std::numeric_limits<float>::infinity())}, 0xfe);
  CHECK_EQ(int{ptx::float_to_e4m3(0x1p-9f)}, 0x01);
  CHECK_EQ(int{ptx::float_to_e4m3(0x1p-10f)}, 0x00);
  CHECK_EQ(int{ptx::float_to_e4m3(-0.0f)}, 0x80);
}

template <class Widen, class Narrow>
void check_all_codes(const Format& format, const Widen& widen, const Narrow& narrow) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const std::uint32_t magnitude = code & 0x7fffu;
    const float value = widen(static_cast<u16>(code));
    CHECK_EQ(std::signbit(value), code >= 0x8000u);
    if (magnitude >= format.first_nan()) {
      CHECK(std::isnan(value));
      const std::uint32_t quiet = code | 1u << (format.mantissa_bits - 1);
      CHECK_EQ(std::uint32_t{narrow(value)}, quiet);
      continue;
    }
    const double expected =
        magnitude == format.infinity() ? std::numeric_limits<double>::infinity() : decode_magnitude(format, magnitude);
    CHECK_EQ(std::fabs(static_cast<double>(value)), expected);
    CHECK_EQ(std::uint32_t{narrow(value)}, code);
  }
}

TEST(all_bf16_codes_there_and_back) { check_all_codes(kBf16, ptx::bf16_to_float, ptx::float_to_bf16); }

TEST(all_fp16_codes_there_and_back) { check_all_codes(kFp16, ptx::fp16_to_float, ptx::float_to_fp16); }

TEST(contributions_have_scales_of_powers_of_two_whose_products_are_exact) {
  const auto check = [](u32 bits) {
    const ptx::Fp8WireScale wire = ptx::fp8_wire_scale(bits);
    const ptx::Fp8Scale ue8m0 = ptx::fp8_scale(bits, Quantize::kFp8Ue8m0);
    const ptx::Fp8Scale pow2 = ptx::fp8_scale(bits, Quantize::kFp8Pow2);
    if (bits >= 0x7f800000u) {
      CHECK(ue8m0.bits == 255 && std::isnan(pow2.factor) && std::isnan(ptx::bits_float(pow2.bits)));
      CHECK(std::isnan(wire.factor) && std::isnan(wire.scale));
      return;
    }
    CHECK_EQ(wire.factor * wire.scale, 1.0f);
    CHECK_EQ(ptx::float_bits(wire.scale), std::min(ue8m0.bits, 246u) << 23);
    CHECK_EQ(pow2.bits, ue8m0.bits << 23);
    CHECK_EQ(pow2.factor, ue8m0.factor);
    CHECK(std::isfinite(448.0f * wire.scale));
  };
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const std::uint32_t mantissa : {0u, 1u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu})
      check(exponent << 23 | mantissa);
  }
  std::mt19937 random(12);
  for (int trial = 0; trial < 1'000'000; ++trial) check(static_cast<u32>(random()) & 0x7fffffffu);
  for (int exponent = -22; exponent <= 119; ++exponent) {
    const float scale = std::ldexp(1.0f, exponent);
    for (u32 code = 0; code < 127; ++code) {
      const float value = ptx::e4m3_to_float(static_cast<u8>(code));
      CHECK_EQ(static_cast<double>(value * scale), static_cast<double>(value) * static_cast<double>(scale));
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
