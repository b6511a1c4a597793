#include "core/error.h"

#include <gtest/gtest.h>

namespace gpucomm {
namespace {

TEST(Error, RanksAreListedAsASentenceWould) {
  EXPECT_EQ(ranks_text({2}), "rank 2");
  EXPECT_EQ(ranks_text({0, 3}), "ranks 0 and 3");
  EXPECT_EQ(ranks_text({1, 3, 5}), "ranks 1, 3 and 5");
}

TEST(Error, PeerFailedNamesTheRankAndTheReason) {
  const PeerFailed error(3, "it was killed");
  EXPECT_EQ(error.rank, 3);
  EXPECT_NE(std::string(error.what()).find("rank 3"), std::string::npos) << error.what();
  EXPECT_NE(std::string(error.what()).find("it was killed"), std::string::npos) << error.what();
}

TEST(Error, CommTimeoutNamesTheMissingRanksAndTheTimeout) {
  const CommTimeout error({1, 2}, 2.5, "all_reduce of bucket 4");
  EXPECT_EQ(error.missing, (std::vector<int>{1, 2}));
  for (const char* part : {"ranks 1 and 2", "2.5", "all_reduce of bucket 4"}) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in: " << error.what();
  }
}

TEST(Error, AFailedAssertionHoldsExpressionValuesAndPlace) {
  const int slots = 3;
  try {
    GPUCOMM_ASSERT(slots == 4, "slots=" + std::to_string(slots));
    FAIL() << "did not throw";
  } catch (const InternalError& error) {
    for (const char* part : {"slots == 4", "slots=3", "error_test.cpp:"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in: " << error.what();
    }
  }
}

}  // namespace
}  // namespace gpucomm
