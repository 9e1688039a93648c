//! Hosted zones of AWS's load balancers and distributions (AWS General Reference, "Elastic
//! Load Balancing endpoints", "CloudFront", "Global Accelerator").

/// Suffix of the target's name, and the hosted zone to use in an alias.
const ZONES: &[(&str, &str)] = &[
    // Application and classic load balancers.
    ("us-east-2.elb.amazonaws.com", "Z3AADJGX6KTTL2"),
    ("us-east-1.elb.amazonaws.com", "Z35SXDOTRQ7X7K"),
    ("us-west-1.elb.amazonaws.com", "Z368ELLRRE2KJ0"),
    ("us-west-2.elb.amazonaws.com", "Z1H1FL5HABSF5"),
    ("ca-central-1.elb.amazonaws.com", "ZQSVJUPU6J1EY"),
    ("ap-east-1.elb.amazonaws.com", "Z3DQVH9N71FHZ0"),
    ("ap-south-1.elb.amazonaws.com", "ZP97RAFLXTNZK"),
    ("ap-northeast-1.elb.amazonaws.com", "Z14GRHDCWA56QT"),
    ("ap-northeast-2.elb.amazonaws.com", "ZWKZPGTI48KDX"),
    ("ap-southeast-1.elb.amazonaws.com", "Z1LMS91P8CMLE5"),
    ("ap-southeast-2.elb.amazonaws.com", "Z1GM3OXH4ZPM65"),
    ("eu-central-1.elb.amazonaws.com", "Z215JYRZR1TBD5"),
    ("eu-west-1.elb.amazonaws.com", "Z32O12XQLNTSW2"),
    ("eu-west-2.elb.amazonaws.com", "ZHURV8PSTC4K8"),
    ("eu-west-3.elb.amazonaws.com", "Z3Q77PNBQS71R4"),
    ("eu-north-1.elb.amazonaws.com", "Z23TAZ6LKFMNIO"),
    ("eu-south-1.elb.amazonaws.com", "Z3ULH7SSC9OV64"),
    ("sa-east-1.elb.amazonaws.com", "Z2P70J7HTTTPLU"),
    ("me-south-1.elb.amazonaws.com", "ZS929ML54UICD"),
    ("af-south-1.elb.amazonaws.com", "Z268VQBMOI5EKX"),
    ("us-gov-west-1.elb.amazonaws.com", "Z33AYJ8TM3BH4J"),
    ("us-gov-east-1.elb.amazonaws.com", "Z166TLBEWOO7G0"),
    // Network load balancers.
    ("elb.us-east-2.amazonaws.com", "ZLMOA37VPKANP"),
    ("elb.us-east-1.amazonaws.com", "Z26RNL4JYFTOTI"),
    ("elb.us-west-1.amazonaws.com", "Z24FKFUX50B4VW"),
    ("elb.us-west-2.amazonaws.com", "Z18D5FSROUN65G"),
    ("elb.ca-central-1.amazonaws.com", "Z2EPGBW3API2WT"),
    ("elb.ap-east-1.amazonaws.com", "Z12Y7K3UBGUAD1"),
    ("elb.ap-south-1.amazonaws.com", "ZVDDRBQ08TROA"),
    ("elb.ap-northeast-1.amazonaws.com", "Z31USIVHYNEOWT"),
    ("elb.ap-northeast-2.amazonaws.com", "ZIBE1TIR4HY56"),
    ("elb.ap-southeast-1.amazonaws.com", "ZKVM4W9LS7TM"),
    ("elb.ap-southeast-2.amazonaws.com", "ZCT6FZBF4DROD"),
    ("elb.eu-central-1.amazonaws.com", "Z3F0SRJ5LGBH90"),
    ("elb.eu-west-1.amazonaws.com", "Z2IFOLAFXWLO4F"),
    ("elb.eu-west-2.amazonaws.com", "ZD4D7Y8KGAS4G"),
    ("elb.eu-west-3.amazonaws.com", "Z1CMS0P5QUZ6D5"),
    ("elb.eu-north-1.amazonaws.com", "Z1UDT6IFJ4EJM"),
    ("elb.eu-south-1.amazonaws.com", "Z23146JA1KNAFP"),
    ("elb.sa-east-1.amazonaws.com", "ZTK26PT1VY4CU"),
    // Other targets.
    ("cloudfront.net", "Z2FDTNDATAQYW2"),
    ("awsglobalaccelerator.com", "Z2BJ6XQ5FK7U4H"),
];

/// Returns the hosted zone of a target.
pub(super) fn hosted_zone(target: &str) -> Option<&'static str> {
    let is_below = |suffix: &str| target.strip_suffix(suffix).is_some_and(|before| before.ends_with('.'));
    ZONES.iter().find(|(suffix, _)| is_below(suffix)).map(|(_, zone)| *zone)
}
